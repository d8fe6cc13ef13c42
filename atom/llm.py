"""The offline API: a list of prompts in, a list of outputs out."""

from __future__ import annotations

import difflib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from tqdm import tqdm

from atom.config import SHIPPED_MODEL, EngineConfig
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.output_processor import OutputKind
from atom.model_engine.request_input import Prompt
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams

Message = dict[str, Any]


class LLM:
    """A model, loaded and ready. ``settings`` are the engine's flags in snake case, such as ``max_model_len=4096``.

    A context manager; leaving it calls :meth:`shutdown`. Raises ``ValueError`` on a setting that cannot be used.
    """

    def __init__(self, model: str = SHIPPED_MODEL, **settings: Any) -> None:
        known = {field.name for field in fields(EngineConfig)}
        unknown = sorted(settings.keys() - known)
        if unknown:
            close = difflib.get_close_matches(unknown[0], known, 1)
            raise ValueError(
                f"{unknown[0]} is no setting of the engine" + (f"; did you mean {close[0]}?" if close else "")
            )
        self._start(LLMEngine(EngineConfig(model=model, **settings)))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> LLM:
        """Wrap an engine that was built already, and own it from now on."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: LLMEngine) -> None:
        self._engine: LLMEngine | None = engine
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; the results are in the order of the prompts.

        prompts: one, or a list of them; each is text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
        sampling_params: for all prompts, or a list with one each. use_tqdm: show progress and tokens a second.
        Raises ``ValueError`` before anything runs if any of the prompts cannot be used. If this is interrupted,
        everything it started is aborted.
        """
        prompts = _as_prompts(prompts)
        params = _one_each(sampling_params, len(prompts))
        prepared = [
            self.engine.prepare(str(next(self._request_ids)), prompt, prompt_params)
            for prompt, prompt_params in zip(prompts, params, strict=True)
        ]
        finished: dict[str, RequestOutput] = {}
        try:
            for request in prepared:
                self.engine.add_prepared(request, OutputKind.FINAL)
            self._run(finished, len(prepared), use_tqdm)
        finally:
            for request in prepared:
                if request.request_id not in finished:
                    self.engine.abort(request.request_id)
        return [finished[request.request_id] for request in prepared]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, written out by the model's chat template.

        chat_template_kwargs: variables for the template. Raises like :meth:`generate`, and if the model has no
        template or the template refuses the messages.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            {
                "prompt_token_ids": self.engine.tokenizer.apply_chat_template(
                    list(conversation), add_generation_prompt, tools, **(chat_template_kwargs or {})
                )
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False if some of it could not be given up."""
        return self.engine.reset_prefix_cache()

    def resize_state_slots(self, num_slots: int) -> None:
        """With ``state_checkpoint_backend="slot"``: make the slot arena ``num_slots`` long, checkpoints going first.

        ``ValueError`` if ``max_num_seqs`` running requests would not fit.
        """
        self.engine.resize_state_slots(num_slots)

    def get_cache_stats(self) -> dict[str, int | float]:
        """Counters of the prefix cache since the start."""
        return self.engine.get_cache_stats()

    @property
    def engine(self) -> LLMEngine:
        """The engine. RuntimeError once it was shut down."""
        if self._engine is None:
            raise RuntimeError("this LLM was shut down; make a new one")
        return self._engine

    def shutdown(self) -> None:
        """Give back the model's memory; only this may be called again, and then does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _run(self, finished: dict[str, RequestOutput], total: int, use_tqdm: bool) -> None:
        """Step until ``total`` requests are in ``finished``, by request id."""
        started, tokens_before = time.monotonic(), self.engine.num_generated_tokens
        with (
            _interrupts_between_steps() as raise_interrupt,
            tqdm(total=total, desc="Requests", unit="request", disable=not use_tqdm) as progress,
        ):
            while len(finished) < total:
                outputs = self.engine.step()
                raise_interrupt()
                finished.update((output.request_id, output) for output in outputs)
                tokens = self.engine.num_generated_tokens - tokens_before
                rate = tokens / max(time.monotonic() - started, 1e-9)
                progress.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                progress.update(len(outputs))


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Hold a Ctrl-C back until the yielded function is called, so that no step is left half done.

    A second Ctrl-C acts at once. Outside the main thread, or where Ctrl-C has another meaning, nothing changes.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield lambda: None
        return
    interrupted = False

    def hold(number: int, frame: object) -> None:
        nonlocal interrupted
        if interrupted:
            usual(number, frame)
        interrupted = True

    def raise_interrupt() -> None:
        if interrupted:
            usual(signal.SIGINT, None)

    signal.signal(signal.SIGINT, hold)
    try:
        yield raise_interrupt
    finally:
        signal.signal(signal.SIGINT, usual)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and all(isinstance(prompt, int) for prompt in prompts) else prompts


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams] | list[None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts; give one for all, or one each")
    return list(params)
