"""What ``atom serve``, ``atom generate`` and ``atom config`` do. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import json
import logging
import os

from rich.console import Console

from atom.config import EngineConfig
from atom.entrypoints.arguments import read_settings
from atom.entrypoints.server_config import ServerConfig, read_log_level
from atom.entrypoints.settings_report import effective_settings, settings_table
from atom.sampling_params import SamplingParams
from atom.utils.envs import LOG_LEVEL

SAMPLING_FLAGS = {
    "max_tokens": (int, 64, "Most tokens to generate."),
    "temperature": (float, 0.0, "0 takes the most likely token; higher is more varied."),
    "top_p": (float, 1.0, "Sample from the likeliest tokens that together have this probability."),
    "top_k": (int, 0, "Sample from this many likeliest tokens; 0: from all."),
    "min_p": (float, 0.0, "Leave out tokens below this share of the likeliest token's probability."),
    "repetition_penalty": (float, 1.0, "Above 1 makes tokens that are there already less likely."),
}


def log_to_stderr(level: str) -> None:
    """Send this process's log to stderr, from ``level`` up."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; the table of settings comes before the address."""
    server = ServerConfig(**read_settings(args, ServerConfig))
    given = read_settings(args, EngineConfig)
    config = EngineConfig(**given)
    assert server.log_level is not None
    log_to_stderr(server.log_level)
    from atom.entrypoints.openai.server import serve
    from atom.model_engine.async_engine import AsyncEngine

    class Engine(AsyncEngine):
        async def start(self) -> None:
            await super().start()
            Console().print(settings_table(effective_settings(config, self.info), given))

    try:
        serve(Engine(config), server.host, server.port, log_level=server.log_level.lower())
    except OSError as error:
        place = f"{server.host} port {server.port}"
        raise RuntimeError(f"cannot serve on {place}: {error.strerror}; --port=0 takes a free port") from error
    return 0


def run_generate(args: argparse.Namespace) -> int:
    """Print one continuation of ``args.text``."""
    config = EngineConfig(**read_settings(args, EngineConfig))
    given = {name: getattr(args, name) for name in SAMPLING_FLAGS}
    params = SamplingParams(stop=args.stop, ignore_eos=args.ignore_eos, **given)
    # The answer is what matters here, so the log is quiet unless someone asked for it.
    log_to_stderr(read_log_level(os.environ.get(LOG_LEVEL.name, "WARNING")))
    from atom.llm import LLM
    from atom.model_engine.llm_engine import LLMEngine

    with LLM.from_engine(LLMEngine(config)) as llm:
        [result] = llm.generate(args.text, params, use_tqdm=False)
    [output] = result.outputs
    if not args.json:
        print(output.text)
        return 0
    report = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.num_cached_tokens,
    }
    print(json.dumps(report))
    return 0


def run_config(args: argparse.Namespace) -> int:
    """Print the settings as they would take effect."""
    given = read_settings(args, EngineConfig)
    config = EngineConfig(**given)
    log_to_stderr(read_log_level(os.environ.get(LOG_LEVEL.name, "WARNING")))
    from atom.entrypoints.planned_engine import planned_info

    settings = effective_settings(config, planned_info(config))
    if args.json:
        print(json.dumps(settings, indent=2))
    else:
        Console().print(settings_table(settings, given))
    return 0
