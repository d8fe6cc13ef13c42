"""The ``atom`` command. Nothing here imports torch, so help and errors come at once."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

import atom
from atom.config import EngineConfig
from atom.entrypoints import commands, demo
from atom.entrypoints.arguments import ArgumentParser, add_settings, flag_name, with_hyphens
from atom.entrypoints.server_config import ServerConfig

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EPILOG = "Flags may be written with hyphens or underscores."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 1 for a failure, 2 for a setting that cannot be used, 130 for Ctrl-C."""
    words = with_hyphens(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ValueError as error:
        return _explain(words, error, EXIT_USAGE)
    except (RuntimeError, OSError) as error:
        return _explain(words, error, EXIT_FAILED)


def make_parser() -> ArgumentParser:
    """The parser of every command but ``bench`` and ``replay``, which parse their own words."""
    parser = ArgumentParser(prog="atom", description=atom.__doc__.splitlines()[0], epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"atom {atom.__version__}")
    parser.set_defaults(parser=parser, run=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, summary: str, run: Callable[[argparse.Namespace], int] | None) -> ArgumentParser:
        added = subparsers.add_parser(name, help=summary, description=summary, epilog=EPILOG)
        added.set_defaults(parser=added, run=run)
        return added

    serve = command("serve", "Serve the OpenAI-compatible HTTP API.", commands.run_serve)
    add_settings(serve, ServerConfig, "server")

    generate = command("generate", "Print a continuation of a text.", commands.run_generate)
    generate.add_argument("text", help="The text to continue.")
    for name, (kind, default, text) in commands.SAMPLING_FLAGS.items():
        metavar = "N" if kind is int else "X"
        generate.add_argument(
            flag_name(name), type=kind, default=default, metavar=metavar, help=f"{text} (default: {default})"
        )
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="End before it; may be repeated.")
    generate.add_argument("--ignore-eos", action="store_true", help="Go on when the model would end.")
    generate.add_argument("--json", action="store_true", help="Print text, token ids and counts as JSON.")

    demo_parser = command("demo", demo.SUMMARY, demo.run)
    demo.add_arguments(demo_parser)

    command("bench", "Measure speed on this machine; parses its own flags.", None)

    command("replay", "Play a request trace through scheduler and cache, without a model; parses its own flags.", None)

    config = command("config", "Print the settings as they would take effect, without loading.", commands.run_config)
    config.add_argument("--json", action="store_true", help="Print them as JSON.")

    for engine_command in (serve, generate, demo_parser, config):
        add_settings(engine_command, EngineConfig, "engine")
    return parser


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["bench"]:
        from atom import benchmarks

        return benchmarks.main(words[1:])
    if words[:1] == ["replay"]:
        from atom.replay import cli

        return cli.main(words[1:])
    parser = make_parser()
    args, unknown = parser.parse_known_args(words)
    if unknown:
        args.parser.refuse(unknown)
    if args.run is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    return args.run(args)


def _explain(words: list[str], error: Exception, code: int) -> int:
    logger.debug("the command failed", exc_info=error)
    print(f"atom {words[0] if words else ''}: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
