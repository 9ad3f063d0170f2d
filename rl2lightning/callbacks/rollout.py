"""`RolloutCallback`: generates before a rollout's first step, pushes weights after each one, samples at validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from rl2lightning.callbacks import logp_check
from rl2lightning.callbacks.dynamic_sampling import refill
from rl2lightning.callbacks.generation import Generators, succeed_together
from rl2lightning.callbacks.held_out import HeldOutSamples
from rl2lightning.callbacks.progress import StepProgressBar
from rl2lightning.callbacks.rollout_metrics import RolloutMetrics
from rl2lightning.data.chat import load_tokenizer, stop_token_ids
from rl2lightning.environments.base import Environment
from rl2lightning.environments.script import ScriptEnvironment
from rl2lightning.rewards.base import FunctionReward, Reward, RewardTransform
from rl2lightning.rollout.auto import default_engine
from rl2lightning.rollout.engine import EngineSpec, RolloutEngine
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.loop import Job, RolloutLoop, RolloutResult
from rl2lightning.rollout.partial import Carried, PartialRollouts
from rl2lightning.seeding import run_seed
from rl2lightning.types import PromptBatch, RolloutError, Row, SamplingParams, Sequences, Trajectory

_PATIENCE = timedelta(seconds=60)  # of a process whose engine did not start, with others that may never come


class RolloutCallback(HeldOutSamples):
    """Owns the engine, the environment and the rewards of a run.

    Subclass it to change one of three things: `collect` (how prompts become trajectories), `keep` (which groups are
    worth learning from) or `push` (when the engine gets new weights).

    Args:
        engine: what generates; auto: vLLM where it is installed, else the embedded Hugging Face engine.
        environment: an Environment, or the path of a Python file with `reward_fn` and, for several turns, `interact`.
        rewards: named, weighted rewards, or plain functions; the environment's own (a file's `reward_fn`) come after
            them. The first one decides accuracy.
        transform: combines several rewards; None: their weighted sum.
        max_turns: most turns of the policy in one trajectory.
        success_threshold: a trajectory counts as correct when its first reward is at least this.
        push: hand the engine new weights after every optimizer step, or only when it is about to generate.
        dynamic_sampling: drop groups whose rewards are all equal, which teach nothing, and draw other prompts instead.
        max_refills: how often to draw again before going on with fewer groups.
        on_reward_error: a reward that raises or returns no finite number ends the run, counts 0, or drops the sample.
        on_environment_error: an environment that raises ends the run, or its own trajectory.
        apply_chat_template: false: the contents of the messages are concatenated (base models); None: as the data
            module does.
        tool_workers: environment steps and rewards that run at a time.
        check_logps: when to compare log-probs of some sampled tokens with the trainer's, and stop if they differ by
            more than rounding: after the first push, before every rollout, or never.
        partial: end rollouts before their longest trajectories do, which go on in the next one; None: play all to the
            end.
        seed: of the sampling, with the prompt, the sample and the turn; None: that of the run (`seed_everything`).
    """

    def __init__(
        self,
        engine: RolloutEngine | Literal["auto"] = "auto",
        environment: Environment | str | None = None,
        rewards: list[Reward] | list[Callable[..., float]] | None = None,
        transform: RewardTransform | None = None,
        max_turns: int = 1,
        success_threshold: float = 1.0,
        push: Literal["every_step", "before_generation"] = "every_step",
        dynamic_sampling: bool = False,
        max_refills: int = 5,
        on_reward_error: Literal["error", "zero", "drop"] = "error",
        on_environment_error: Literal["error", "end"] = "end",
        apply_chat_template: bool | None = None,
        tool_workers: int = 32,
        check_logps: Literal["first", "always", "never"] = "first",
        partial: PartialRollouts | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(success_threshold)
        self._choose = not isinstance(engine, RolloutEngine)
        self.engine = engine if isinstance(engine, RolloutEngine) else HFEngine()  # chosen in `setup`, by the device
        self.environment = ScriptEnvironment(environment) if isinstance(environment, str) else environment
        self.rewards = [r if isinstance(r, Reward) else FunctionReward(r) for r in rewards or ()]
        self.transform = transform
        self.max_turns = max_turns
        self.push_when = push
        self.dynamic_sampling = dynamic_sampling
        self.max_refills = max_refills
        self.on_reward_error: Literal["error", "zero", "drop"] = on_reward_error
        self.on_environment_error: Literal["error", "end"] = on_environment_error
        self.apply_chat_template = apply_chat_template
        self.tool_workers = tool_workers
        self.seed = run_seed() if seed is None else seed
        self.check_logps = check_logps
        self.partial = partial
        self._carried: list[Carried] = []  # of the whole run, the same on every process
        self.loop: RolloutLoop | None = None
        self._generators: Generators | None = None
        self._strategy: Any = None
        self._trainer: Any = None
        self._check_due = check_logps != "never"
        self._data_position: dict[str, Any] | None = None  # before the batch in hand

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "carried": [c.state_dict() for c in self._carried]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seed = state_dict["seed"]  # a run goes on sampling as it did, whatever seed it is resumed with
        self._carried = [Carried.of(state) for state in state_dict.get("carried", ())]

    # ---- the engine's life

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit":  # a new run; a checkpoint is restored after this
            self._carried = []
        if self._strategy is not None:
            return
        self._strategy = strategy = pl_module.strategy  # which says so if it is not ours
        self._trainer = trainer
        if self._choose:
            self.engine, why = default_engine(strategy.root_device.type, pl_module.local_model_path())
            rank_zero_info(why)
        tokenizer = load_tokenizer(pl_module.tokenizer_path)
        from_data = getattr(trainer.datamodule, "apply_chat_template", True)  # type: ignore[attr-defined]
        chat = from_data if self.apply_chat_template is None else self.apply_chat_template
        pl_module.check_turns(self.max_turns)
        for reward in self.rewards:
            reward.check(tokenizer)
        if self.environment is not None and self.max_turns < self.environment.min_turns:
            rank_zero_warn(
                f"{type(self.environment).__name__} is asked for no answer with max_turns={self.max_turns}: set "
                f"max_turns of RolloutCallback to at least {self.environment.min_turns} if it should be"
            )
        if self.partial is not None and stage == "fit":
            pl_module.check_partial()
        self._check_due = self.check_logps != "never"
        self._generators = Generators(self.engine, strategy.meshes.replica.size())
        spec = EngineSpec(
            model_path=pl_module.local_model_path(),
            device=strategy.root_device,
            dtype=strategy.compute_dtype,
            stop_token_ids=stop_token_ids(tokenizer, pl_module.local_model_path(), apply_chat_template=chat),
            tokenizer=tokenizer,
            structured=pl_module.structured,
            adapter_rank=pl_module.adapter_rank,
        )
        try:
            succeed_together(lambda: self._start(spec), patience=_PATIENCE)
        except RolloutError as error:
            if isinstance(error.__cause__, ValueError):  # a wrong setting
                raise error.__cause__ from None
            raise
        self.loop = RolloutLoop(
            self.engine,
            tokenizer,
            environment=self.environment,
            rewards=self.rewards,
            transform=self.transform,
            max_turns=self.max_turns,
            tool_workers=self.tool_workers,
            on_reward_error=self.on_reward_error,
            on_environment_error=self.on_environment_error,
            apply_chat_template=chat,
        )

    def _start(self, spec: EngineSpec) -> None:
        for reward in self.rewards:
            reward.prepare(self._strategy.root_device)
        self.engine.start(spec)
        self.engine.sleep()  # the model that is trained comes next, and has the device to itself

    def _close(self) -> None:
        self._strategy = self._trainer = None
        generators, self._generators = self._generators, None
        self.loop = None
        if generators is not None:
            self.engine.shutdown()
            generators.close()
        for reward in self.rewards:
            reward.release()

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close()  # Lightning runs no teardown hooks after an exception

    # ---- what a subclass may change

    def push(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Hands the engine the policy's weights unless it has those of this optimizer step; all processes take part."""
        step = pl_module.weights_step
        if self.engine.version == step:
            return
        if self.engine.takes_adapters:
            config, adapter = pl_module.policy_adapter()
            self.engine.update_adapter(pl_module.frozen_weights(), config, adapter, step)
        else:
            self.engine.update_weights(pl_module.policy_weights(), step)

    def play(
        self, jobs: list[Job], sampling: SamplingParams, *, partial: PartialRollouts | None = None
    ) -> RolloutResult:
        """Runs this replica's trajectories through engines, environment and rewards; all its processes get them.

        Args:
            partial: goes on with what earlier rollouts left, and leaves what is cut off now.
        """
        carried = [] if partial is None else self._carried
        loop, generators, bar = self.loop, self._generators, self._trainer.progress_bar_callback
        assert loop is not None and generators is not None
        progress = bar.generation if isinstance(bar, StepProgressBar) else None

        def run(share: list[Job], ours: list[Carried]) -> RolloutResult:
            return loop.run(share, sampling, self.seed, partial=partial, carried=ours, progress=progress)

        try:
            result = generators.play(jobs, run, carried)
        finally:
            if progress is not None:
                bar.generation_ended()
        if partial is not None:
            self._carried = result.carried
        return result

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The engine's part of the device, as long as it generates."""
        room = ExitStack()
        try:
            succeed_together(lambda: room.enter_context(self._strategy.offloaded()))
            succeed_together(self.engine.wake)
            yield
            succeed_together(self._sleep)
        except RolloutError:  # on all processes
            with suppress(RolloutError):  # what comes back needs the room; what went wrong first says more
                succeed_together(self._sleep)
            self._give_back(room)
            raise
        except BaseException:  # on this process, for all it knows
            room.close()
            raise
        self._give_back(room)

    def _give_back(self, room: ExitStack) -> None:
        """Where that fails, what is trained is lost: no RolloutError, after which a checkpoint would be saved."""
        succeed_together(room.close, raising=RuntimeError)

    def _sleep(self) -> None:
        self.engine.sleep()
        for reward in self.rewards:
            reward.sleep()

    def collect(
        self, trainer: L.Trainer, pl_module: Any, rows: list[dict], indices: list[int], metrics: RolloutMetrics
    ) -> list[Trajectory]:
        """The trajectories of this process's prompts, samples_per_prompt each.

        Of partial rollouts, those of the groups that are complete now, whichever rollout they began in.
        """
        samples = range(pl_module.samples_per_prompt)
        jobs = [Job(row, group_id=i, sample_id=k) for row, i in zip(rows, indices, strict=True) for k in samples]
        result = self.play(jobs, pl_module.sampling, partial=self.partial)
        metrics.add(result, version=self.engine.version if self.partial is not None else None)
        return result.trajectories

    def keep(self, group: list[Trajectory]) -> bool:
        """Whether dynamic sampling keeps a group: whether its rewards differ."""
        return len({t.reward for t in group}) > 1

    # ---- training

    def _push(self, trainer: L.Trainer, pl_module: Any) -> None:
        succeed_together(lambda: self.push(trainer, pl_module))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not isinstance(batch, PromptBatch) or not batch.first_of_rollout:
            return
        metrics = RolloutMetrics(self.success_threshold)
        carried = self._carried
        try:
            self._push(trainer, pl_module)
            with self._awake():
                trajectories = self._roll_out(trainer, pl_module, batch, metrics)
                probe = self._probe(trajectories)
            self._compare(pl_module, probe)
        except RolloutError:
            self._carried = carried
            if self._data_position is not None:  # a checkpoint of this state goes on with this very rollout
                trainer.datamodule.load_state_dict(self._data_position)  # type: ignore[attr-defined]
            raise
        batch.trajectories, batch.rolled_out = trajectories, True
        if trajectories:
            batch.rollout = Sequences.from_trajectories(trajectories, temperature=pl_module.sampling.temperature)
        if self.partial is not None and pl_module.strategy.data_rank == 0:  # every process has all of them
            metrics.count("partial", sum(not c.ended for c in self._carried))
            metrics.count("waiting", sum(c.ended for c in self._carried))
        logged = metrics.reduce(pl_module.strategy.gather_objects)
        pl_module.report_lost_samples(logged)
        pl_module.log("rollout/reward", logged.pop("reward", float("nan")), prog_bar=True, batch_size=1)
        pl_module.log_dict({f"rollout/{name}": x for name, x in logged.items()}, batch_size=1)

    def _roll_out(
        self, trainer: L.Trainer, pl_module: Any, batch: PromptBatch, metrics: RolloutMetrics
    ) -> list[Trajectory]:
        """The trajectories of this process that are learned from now."""

        def collect(rows: list[Row], indices: list[int]) -> list[Trajectory]:
            return self.collect(trainer, pl_module, rows, indices, metrics)

        before = self._carried
        trajectories = collect(batch.rows, batch.indices)
        while self._carried and not any(self._strategy.gather_objects(bool(trajectories))):  # nothing to learn from yet
            trajectories = collect([], [])
        if not self.dynamic_sampling:
            return trajectories
        return refill(
            trainer,
            trajectories,
            metrics,
            num_prompts=len(batch.rows),
            max_refills=self.max_refills,
            collect=collect,
            keep=self.keep,
            before=before,
            carried=lambda: self._carried,
        )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note_position(trainer)
        if isinstance(batch, PromptBatch) and self.push_when == "every_step":
            self._push(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._note_position(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._carried:
            rank_zero_info(
                f"{len(self._carried)} trajectories of partial rollouts were not learned from; a run that goes on from "
                "a checkpoint of now goes on with them"
            )

    def _note_position(self, trainer: L.Trainer) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        self._data_position = None if data is None else data.state_dict()

    # ---- are engine and trainer one model?

    def _probe(self, trajectories: list[Trajectory]) -> Sequences | None:
        return logp_check.probe(self.engine, trajectories) if self._check_due else None

    def _compare(self, pl_module: Any, probe: Sequences | None) -> None:
        if probe is not None:
            logp_check.compare(pl_module, probe)
            self._check_due = self.check_logps == "always"

    # ---- validation, test, prediction

    def sample_held_out(self, trainer: L.Trainer, pl_module: Any, jobs: list[Job]) -> RolloutResult:
        self._push(trainer, pl_module)
        with self._awake():
            result = self.play(jobs, pl_module.eval_sampling)
            probe = self._probe(result.trajectories)
        self._compare(pl_module, probe)
        return result
