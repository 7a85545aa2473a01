"""Generation: many texts in a paged cache, prefilled in chunks, decoded together, with drafts that steps verify.

The host decides (which texts run, their pages, their drafts) with plain Python and numpy; the device computes, in a
handful of compiled shapes, and keeps the state of the texts. The host reads the tokens of a step while the next one
runs; with speculation it reads them before it starts the next one, because the drafts come from them.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_jax.generate import step as steps
from tsmla_jax.generate.caches import cache_bytes
from tsmla_jax.generate.config import ModelConfig
from tsmla_jax.generate.contexts import bound_of_context, context_passes
from tsmla_jax.generate.drafting import NgramDrafter
from tsmla_jax.generate.explaining import Choice
from tsmla_jax.generate.figures import Figures
from tsmla_jax.generate.mesh import make_mesh, put_params
from tsmla_jax.generate.model import Params, Scales, StepOptions, fold, rope_tables
from tsmla_jax.generate.plan import BATCH_SIZES, EngineOptions, Plan, check_text, is_count, make_plan, make_serving_plan
from tsmla_jax.generate.programs import programs_for
from tsmla_jax.generate.replica import Replica, Text, fill_prompts
from tsmla_jax.generate.sampling import NOT_FINITE, Sampling
from tsmla_jax.generate.session import Session, Started, StepKind, Tokens
from tsmla_jax.generate.step import Constants, Drafts, Prompts, StepConfig
from tsmla_jax.nn.inputs import check_config
from tsmla_kernels.contract import FP8


def say_on_terminal(step: str, seconds: float | None) -> None:
    """Says on stderr that a step is being compiled or, with seconds, that it was; nothing if stderr is no terminal."""
    if sys.stderr.isatty():
        took = "" if seconds is None else f": {seconds:.1f} s"
        print(f"{'compiling' if seconds is None else 'compiled'} {step}{took}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Generation:
    """Results of `Engine.generate`.

    Attributes:
      tokens: the generated ids of each prompt, the token that ended the text included.
      figures: the costs of the run.
      choices: which implementations ran attention, the choice of keys, V4's compression and the experts, and why.
    """

    tokens: list[list[int]]
    figures: Figures
    choices: tuple[Choice, ...]


OnTokens = Callable[[int, list[int], bool], None]
OnCompile = Callable[[str, float | None], None]


class Engine:
    """Generates with one model, by `generate`, or text by text by `admit`, `step` and `drop`.

    Compiled programs are kept between texts and between calls of `generate`. They are few for a plan, each compiled
    when it is first needed: a decode step of the size of `plan.BATCH_SIZES` that holds all texts of a replica (with
    speculation one with drafts, too), and prefill steps of the sizes `Plan.prefill_sizes`, each for a few bounds on the
    context. `compile_ahead` adds smaller decode steps.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        options: EngineOptions | None = None,
        on_compile: OnCompile | None = say_on_terminal,
    ) -> None:
        """
        Args:
          params: as `load_model` returns them; on a mesh they are put there, if they are not there already.
          config: the model.
          options: how to generate.
          on_compile: called with the name of a step that is about to be compiled and None, then with that name and the
            seconds it took. By default a line on stderr says so where that is a terminal; None says nothing.

        Raises:
          TypeError: an argument of another class.
          ValueError: options that don't go with the model, `params` or jax's devices; `params` split for another mesh.
        """
        check_config(config, ModelConfig)
        if not isinstance(params, Mapping):
            raise TypeError(f"params: got {type(params).__name__}; legal: a dict, as load_model returns it")
        self.config = config
        self.options = EngineOptions() if options is None else options
        if not isinstance(self.options, EngineOptions):
            raise TypeError(f"options: got {type(options).__name__}; legal: EngineOptions, or None")
        self.figures = Figures()
        self._dtype = params["embed"].dtype.name
        self.options.check(config, self._dtype)
        self._mesh = make_mesh(self.options.mesh)
        self._params = fold(put_params(self._mesh, params, config), config)
        self._weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
        self._compiled_model = steps.without_ends(config)
        self._on_compile = on_compile
        self._compiled: set[tuple[Any, ...]] = set()
        self._session: Session | None = None
        self._marked = 0.0

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Continues every prompt by up to max_new_tokens tokens, or to the first end-of-text token.

        Args:
          prompts: token ids; any number of prompts of any lengths. Those that don't fit the cache together take turns.
          max_new_tokens: at least 1.
          on_tokens: called with (prompt's index, new tokens, finished) as tokens come.

        Raises:
          ValueError, NotImplementedError: as `make_plan`; and ValueError while admitted texts are under way.
          FloatingPointError: the logits of a text are NaN or infinite; names it and its token.
        """
        if self._session is not None and self._session.texts:
            raise ValueError("generate: admitted texts are under way; legal: after their last step, or after close")
        plan = make_plan(self.config, self.options, prompts, max_new_tokens, self._dtype).with_experts(self._params)
        self._open(plan)
        results: list[list[int]] = [[] for _ in prompts]
        waiting = deque(enumerate(prompts))
        try:
            while waiting or self._opened().texts:
                while waiting and self.admit(*waiting[0], max_new_tokens):
                    waiting.popleft()
                for text_id, tokens, finished in self.step():
                    results[text_id] += tokens
                    if on_tokens:
                        on_tokens(text_id, tokens, finished)
        finally:
            # The caches were made for these prompts; the next ones may need others.
            self.close()
        return Generation(results, self.figures, plan.choices)

    def admit(self, text_id: int, tokens: Sequence[int], max_new_tokens: int) -> bool:
        """Takes up a text, if there is room for it now.

        Args:
          text_id: the caller's number, 0 to 2**31 - 1, that no text under way has; its random bits depend on it.
          tokens: the prompt.
          max_new_tokens: at least 1.

        Returns:
          True; or False, and nothing changes, if no replica has room for it or max_batch texts are under way.

        Raises:
          ValueError: an empty prompt, an id outside the vocabulary, a max_new_tokens below 1, a text that would never
            fit; a text_id that is illegal or in use; or there are no caches yet, and options.num_pages is None or
            options.implementation unknown.
          NotImplementedError: the implementation that was asked for can't run this.
          RuntimeError: as `step`.
        """
        self.open()
        session = self._opened()
        if not is_count(text_id) or text_id >= 2**31 or text_id in session.texts:
            raise ValueError(f"text_id = {text_id}; legal: an int, 0 to 2**31 - 1, and of no text under way")
        tokens, need = check_text(self.config, session.plan, f"text {text_id}", tokens, max_new_tokens)
        roomy = [replica for replica in session.replicas if replica.has_room(need)]
        if not roomy or len(session.texts) == self.options.max_batch:
            return False
        replica = min(roomy, key=lambda one: (one.num_texts, -one.allocator.available))
        drafter = NgramDrafter(tokens) if self.options.speculative else None
        text = session.texts[text_id] = replica.admit(text_id, tokens, max_new_tokens, need, drafter)
        self.figures.prompt_tokens += len(text.prompt)
        self.figures.peak_pages = self.options.mesh.context * sum(one.allocator.peak for one in session.replicas)
        return True

    def step(self) -> list[Tokens]:
        """Starts the next step (a chunk of prompts if any wait, else a token of every text) and returns new tokens.

        Without speculation these are the tokens of the step before, so that the host works while the device does. With
        speculation they are the tokens of this step. A chunk that does not end its prompt brings no token: a text is
        under way until its Tokens say `finished`. A closed engine returns no tokens.

        Raises:
          FloatingPointError: the logits of a text are NaN or infinite; names it and its token. That text is ended, and
            the others can go on.
          RuntimeError: an earlier `step`, `drop` or `compile_ahead` was broken off by another exception, Ctrl-C for
            one, and the texts are lost; legal is `close`.
        """
        if self._session is None:
            return []
        session = self._opened()
        # With speculation a step needs the last step's tokens. If reading them raised, they are still to be read.
        started = bool(self.options.speculative and session.started)
        if not started:
            with session.changes():
                started = self._start()
        if session.texts and not session.started:
            raise AssertionError("texts are under way, and none of them has anything to do")
        return self._read(keep=1 if started and not self.options.speculative else 0)

    def drop(self, text_id: int) -> None:
        """Ends a text; those of its tokens that have not been returned are lost.

        Args:
          text_id: its number.

        Raises:
          ValueError: it is not under way.
          RuntimeError: as `step`.
        """
        if self._session is None or text_id not in self._session.texts:
            raise ValueError(f"text_id = {text_id}; legal: a text under way")
        session = self._opened()
        text = session.texts[text_id]
        row = text.replica * session.plan.rows + text.row
        with session.changes():
            session.state = session.programs.drop_row(session.state, np.int32(row))
            session.found = [each for each in session.found if each.text_id != text_id]
            self._finish(session, text)

    def open(self) -> None:
        """Makes the caches for texts that come one by one, if there are none. Raises what `admit` does for options."""
        if self._session is None:
            self._open(make_serving_plan(self.config, self.options, self._dtype).with_experts(self._params))

    @property
    def plan(self) -> Plan:
        """The shapes of the run. ValueError unless the engine is open; RuntimeError as `step`."""
        return self._opened().plan

    def close(self) -> None:
        """Forgets the texts under way and lets the caches go; the next `admit` makes new ones."""
        self._session = None

    def compile_ahead(self, batch_sizes: Sequence[int] = (), *, prefill: bool = True) -> None:
        """Compiles decode steps of these batch sizes and, if `prefill`, every prefill step, before texts wait for them.

        Args:
          batch_sizes: sizes of `plan.BATCH_SIZES`, up to the one that holds a replica's share of options.max_batch,
            which is compiled in any case.
          prefill: whether prefill steps are compiled.

        Raises:
          ValueError: another batch size. Other errors as `admit`.
        """
        self.open()
        legal = [size for size in BATCH_SIZES if size <= self.plan.rows]
        for size in batch_sizes:
            if size not in legal:
                raise ValueError(f"batch_sizes: got {size}; legal: {', '.join(map(str, legal))}")
        with self._opened().changes():
            self._compile_all([*dict.fromkeys((*batch_sizes, self.plan.rows))], prefill)

    def _compile_all(self, batch_sizes: Sequence[int], prefill: bool) -> None:
        plan = self.plan
        for size in batch_sizes:
            for most in dict.fromkeys((0, self.options.speculative)):
                self._compile(StepKind("decode", size), steps.no_drafts(plan.mesh.replicas * size, most))
        longest = plan.max_pages * plan.span
        prefill_kinds = {self._prefill_kind(plan, cached) for cached in range(1, longest, self.options.chunk)}
        kinds = [StepKind("fresh", plan.prefill_rows), *prefill_kinds]
        for kind in kinds if prefill else ():
            for size in plan.prefill_sizes:
                self._compile(kind, self._no_prompts(kind, size))

    def _opened(self) -> Session:
        if self._session is None:
            raise ValueError("the engine is closed; legal: after open, compile_ahead or admit")
        if self._session.broken:
            raise RuntimeError(f"a step was broken off ({self._session.broken}), and its texts are lost; legal: close")
        return self._session

    def _open(self, plan: Plan) -> None:
        """Makes empty caches and an empty state."""
        layout, given, mesh = plan.layout, self.options, plan.mesh
        programs = programs_for(self._mesh, plan.at_once)
        constants = Constants(
            ends=jnp.asarray((*self.config.eos_token_ids, NOT_FINITE), jnp.int32),
            sampling=Sampling(np.uint32(given.seed), np.float32(given.temperature), np.float32(given.top_p)),
            scales=Scales(
                kv_scale=jnp.float32(given.kv_scale) if layout.dtype == FP8 else None,
                q_scale=jnp.float32(given.q_scale) if plan.q_dtype == FP8 else None,
            ),
            ropes=rope_tables(self.config, plan.max_pages * plan.span),
        )
        self._session = Session(
            plan,
            programs,
            [Replica(index, plan.batch, layout.num_pages, plan.span) for index in range(mesh.replicas)],
            programs.init_caches(self.config, layout),
            programs.init_state(plan.rows, plan.max_pages),
            programs.put_constants(constants),
        )
        sizes = cache_bytes(self.config, layout)
        self.figures = Figures(
            weight_bytes=self._weight_bytes,
            cache_bytes_per_token=sizes.per_token,
            cache_bytes_per_text=sizes.per_text,
            cache_bytes=sizes.total * mesh.size,
            cache_pages=layout.num_pages * mesh.size,
            page_size=layout.page_size,
        )

    def _start(self) -> bool:
        """Starts a step and returns True; False if there is nothing to do."""
        session = self._opened()
        if not session.started:
            self._marked = time.perf_counter()
        if any(replica.arrived for replica in session.replicas):
            self._start_prefill(session)
            return True
        texts = [text for text in session.texts.values() if text.scheduled < text.limit]
        if texts:
            self._start_decode(session, texts)
        return bool(texts)

    def _start_prefill(self, session: Session) -> None:
        """Starts a prefill step: the next chunk of a prompt that was begun, or the first tokens of some prompts."""
        plan, replicas = session.plan, session.replicas
        kind = StepKind("fresh", plan.prefill_rows)
        if cached := max(replica.arrived[0].cached for replica in replicas if replica.arrived):
            kind = self._prefill_kind(plan, cached)
        parts = [replica.next_prompts(kind.rows, self.options.chunk) for replica in replicas]
        total = max(sum(len(tokens) for _, tokens in own) for own in parts)
        prompts = self._no_prompts(kind, next(size for size in plan.prefill_sizes if size >= total))
        whole: dict[int, Text] = {}
        for index, own in enumerate(parts):
            ended = fill_prompts(steps.of_replica(prompts, index, len(replicas)), own)
            whole |= {index * kind.rows + place: text for place, text in ended.items()}
        session.started.append(Started("prefill_seconds", self._run(kind, prompts), whole))

    def _start_decode(self, session: Session, texts: Sequence[Text]) -> None:
        """Starts a decode step of these texts, each with its last token and the drafts after that token."""
        rows, most = self._batch_size(1 + max(text.row for text in texts)), self.options.speculative
        count, places = rows * len(session.replicas), {text.replica * rows + text.row: text for text in texts}
        drafts = steps.no_drafts(count)
        # A draft past the limit could not be used, and its slot was not reserved.
        rooms = {place: min(most, text.limit - text.scheduled - 1) for place, text in places.items()}
        found = {place: text.drafter.draft(rooms[place]) for place, text in places.items() if text.drafter}
        if any(found.values()):
            drafts = steps.no_drafts(count, most)
            for place, draft in found.items():
                drafts.tokens[place, : len(draft)], drafts.lens[place] = draft, len(draft)
        for text in texts:
            text.scheduled += 1
        self.figures.decode_steps += 1
        self.figures.drafted_tokens += int(drafts.lens.sum())
        tokens = self._run(StepKind("decode", rows), drafts)
        session.started.append(Started("decode_seconds", tokens, places))

    def _batch_size(self, rows: int) -> int:
        """The smallest compiled size of a decode step that holds `rows` rows; if there is none, the plan's rows."""
        most = self.plan.rows
        for size in BATCH_SIZES:
            drafts = steps.no_drafts(self.plan.mesh.replicas * size)
            if rows <= size < most and self._key(StepKind("decode", size), drafts) in self._compiled:
                return size
        return most

    def _prefill_kind(self, plan: Plan, cached: int) -> StepKind:
        """The kind of a prefill step whose texts have up to `cached` cached tokens."""
        passes = context_passes(self.config, plan, chunk=self.options.chunk, cached=cached)
        most_cached = bound_of_context(self.config, plan, chunk=self.options.chunk, cached=cached)
        return StepKind("prefill", 1, passes, most_cached)

    def _no_prompts(self, kind: StepKind, tokens: int) -> Prompts:
        return steps.no_prompts(tokens, kind.rows, self.plan.max_pages, self.plan.mesh.replicas)

    def _key(self, kind: StepKind, work: Prompts | Drafts) -> tuple[Any, ...]:
        plan = self.plan
        return kind, work.tokens.shape, plan.rows, plan.max_pages, plan.layout

    def _compile(self, kind: StepKind, work: Prompts | Drafts) -> None:
        """Compiles a step, unless it is compiled already, by running it on `work`, which has no texts, and on a state
        without texts: no slot is written."""
        key, session = self._key(kind, work), self._opened()
        if key in self._compiled:
            return
        tokens = work.tokens.size if isinstance(work, Prompts) else work.tokens.size + work.lens.size
        step = f"{'decode' if kind.phase == 'decode' else 'prefill'} of {tokens} tokens"
        if kind.phase == "prefill":
            cached = kind.passes.chunk * kind.passes.number if kind.passes else kind.most_cached
            most = f"up to {cached} " if cached else ""
            step += f" after {most}cached ones"
        replicas = self.plan.mesh.replicas
        step += f", up to {replicas * kind.rows} texts" + (f" on {replicas} replicas" if replicas > 1 else "")
        if session.started:  # so that a step under way does not run while the compiler is timed
            jax.block_until_ready(session.started[-1].tokens)
        if self._on_compile:
            self._on_compile(step, None)
        begin = time.perf_counter()
        plan, state = session.plan, session.state
        session.state = session.programs.init_state(plan.rows, plan.max_pages)
        jax.block_until_ready(self._compute(kind, work))
        session.state = state
        seconds = time.perf_counter() - begin
        self._compiled.add(key)
        self.figures.compile_seconds += seconds
        self._marked += seconds
        if self._on_compile:
            self._on_compile(step, seconds)

    def _run(self, kind: StepKind, work: Prompts | Drafts) -> jax.Array:
        """The tokens of a step, which this starts on the device, with a copy of them to the host."""
        if isinstance(work, Prompts):
            self._compile(kind, self._no_prompts(kind, work.tokens.size // self.plan.mesh.replicas))
        else:
            self._compile(kind, steps.no_drafts(*work.tokens.shape))
        tokens = self._compute(kind, work)
        tokens.copy_to_host_async()
        return tokens

    def _compute(self, kind: StepKind, work: Prompts | Drafts) -> jax.Array:
        session, (run, arguments) = self._opened(), self.call(kind, work)
        session.state, session.caches, tokens = run(*arguments)
        return tokens

    def call(self, kind: StepKind, work: Prompts | Drafts) -> tuple[Any, tuple[Any, ...]]:
        """The function of a step, and its arguments; with them a program of a whole step can be compiled ahead."""
        session, given = self._opened(), self.options
        layout, programs = session.plan.layout, session.programs
        options = StepOptions(
            kind.phase,
            kind.passes.chunk if kind.passes else given.chunk,
            kind.passes.number if kind.passes else None,
            given.implementation,
            layout.page_size,
            layout.window_rows,
            session.plan.mesh,
            most_cached=kind.most_cached,
        )
        config = StepConfig(self._compiled_model, options, kind.rows, given.temperature == 0)
        run = programs.prefill if isinstance(work, Prompts) else programs.decode
        work = programs.put_work(work)
        return run, (self._params, session.caches, session.state, session.constants, work, config)

    def _read(self, keep: int) -> list[Tokens]:
        """The new tokens of the started steps, except the last `keep` steps, which are left unread."""
        session = self._opened()
        while len(session.started) > keep:
            started = session.started[0]
            tokens = np.asarray(started.tokens)  # waits for the device; Ctrl-C here loses nothing
            if (tokens == NOT_FINITE).any():
                # If tokens of other steps were found, they are returned first: the next call reads this step again.
                if session.found:
                    break
                self._refuse_unfinite(session, started, tokens)
            with session.changes():
                session.started.popleft()
                session.found += self._take(session, started, tokens)
        found, session.found = session.found, []
        return found

    def _take(self, session: Session, started: Started, tokens: np.ndarray[Any, Any]) -> list[Tokens]:
        """Gives the tokens of a step to its texts, and returns them by text."""
        now = time.perf_counter()
        setattr(self.figures, started.seconds, getattr(self.figures, started.seconds) + now - self._marked)
        self._marked = now
        found: list[Tokens] = []
        for row, text in started.texts.items():
            # A text that ended in the step before had a row in this one, too.
            new = [] if text.done else [token for token in tokens[row].ravel().tolist() if token != steps.NO_TOKEN]
            if new:
                found.append(self._append(session, text, new))
                if started.seconds == "decode_seconds":
                    self.figures.decoded_tokens += len(new)
                    self.figures.accepted_tokens += len(new) - 1
        return found

    def _refuse_unfinite(self, session: Session, started: Started, tokens: np.ndarray[Any, Any]) -> None:
        """Raises FloatingPointError for the first text whose logits in this step are not finite, and ends that text."""
        for row, text in started.texts.items():
            unfinite = np.flatnonzero(tokens[row] == NOT_FINITE)  # after the drafts that were accepted
            if not text.done and unfinite.size:
                place, kind = len(text.generated) + int(unfinite[0]) + 1, started.seconds.partition("_")[0]
                self._finish(session, text)
                raise FloatingPointError(
                    f"text {text.text_id}: the logits of its new token {place} are NaN or infinite (a {kind} step)"
                )

    def _append(self, session: Session, text: Text, tokens: list[int]) -> Tokens:
        """Adds tokens to a text, and ends it at its limit or an end-of-text token; returns its `Tokens`."""
        text.generated += tokens
        text.scheduled = max(text.scheduled, len(text.generated))
        if text.drafter:
            text.drafter.extend(tokens)
        finished = len(text.generated) == text.limit or tokens[-1] in self.config.eos_token_ids
        self.figures.generated_tokens += len(tokens)
        if finished:
            self._finish(session, text)
        return Tokens(text.text_id, tokens, finished)

    def _finish(self, session: Session, text: Text) -> None:
        """Releases the row and the pages of a text."""
        text.done = True
        session.replicas[text.replica].release(text)
        del session.texts[text.text_id]
