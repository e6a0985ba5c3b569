"""Many environments on one event loop, as one Gymnasium vector environment: ``gymnasium.make_vec(ID, num_envs=N)``.

Their servers start, answer and hang side by side, in one thread: a step takes as long as its slowest environment. (A
process per environment, as Gymnasium's ``AsyncVectorEnv`` has, is the wrong tool for work that waits.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from arenarl.async_env import AsyncToolEnv, StepResult
from arenarl.env import UnicodeText, as_taskset, as_text, on_loop, reset_limit, step_limit
from arenarl.errors import ConfigError, EnvError
from arenarl.mcp import ServerHub
from arenarl.taskset import TaskSet

Texts = tuple[str, ...]


class ToolVectorEnv(VectorEnv[Texts, Sequence[str], np.ndarray[Any, Any]]):
    """N `AsyncToolEnv` with one hub. Observations and actions are N texts.

    An environment that has ended stays ended until it is reset (``AutoresetMode.DISABLED``): reset it with
    ``reset(options={"reset_mask": mask})``, where mask is a [N] bool array. Stepping an ended one is an error; give
    None as its action to leave it alone. Every value of ``infos`` is a [N] object array, with a mask under ``_key``.

    Args:
        num_envs: N.
        taskset, env_config, kwargs: as in `arenarl.env.ToolGymEnv`.

    Raises:
        ConfigError: if ``num_envs`` is not positive, or an argument is refused by `AsyncToolEnv`.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(
        self, num_envs: int, taskset: TaskSet | str, env_config: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.closed = True  # nothing to close until all is built
        if num_envs < 1:
            raise ConfigError(f"num_envs={num_envs!r} is refused; give a positive number")
        self.num_envs = num_envs
        self.single_observation_space = self.single_action_space = UnicodeText()
        self.observation_space = self.action_space = batch_space(UnicodeText(), num_envs)
        self._hub = ServerHub()
        tasks = as_taskset(taskset, env_config)
        self.cores = [AsyncToolEnv(tasks, hub=self._hub, **kwargs) for _ in range(num_envs)]
        self._observations = [""] * num_envs
        self._ended = np.ones(num_envs, dtype=np.bool_)
        self.closed = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Texts, dict[str, Any]]:
        """Begin episodes, all of them or those of the mask, side by side.

        Args:
            seed: environment n gets ``seed + n``, or ``seed[n]``.
            options: ``reset_mask``, a [N] bool array; the rest as in `AsyncToolEnv.reset`.
        """
        given = dict(options or {})
        mask = np.asarray(given.pop("reset_mask", np.ones(self.num_envs, dtype=np.bool_)))
        if mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ConfigError(f"reset_mask must be a bool array of shape ({self.num_envs},), got {mask!r}")
        if seed is None:
            seeds: Sequence[int | None] = [None] * self.num_envs
        else:
            seeds = seed if isinstance(seed, Sequence) else [int(seed) + n for n in range(self.num_envs)]
        if len(seeds) != self.num_envs:
            raise ConfigError(f"seed has {len(seeds)} entries for {self.num_envs} environments; give one for each")
        chosen = [int(n) for n in np.flatnonzero(mask)]
        work = [self.cores[n].reset(seed=seeds[n], options=given) for n in chosen]
        infos: dict[str, Any] = {}
        for n, (messages, info) in zip(chosen, on_loop(_all(work), reset_limit(self.cores[0])), strict=True):
            self._ended[n] = False
            self._observations[n] = as_text(messages)
            infos = self._add_info(infos, {**info, "messages": messages}, n)
        return tuple(self._observations), infos

    def step(
        self, actions: Sequence[str | None]
    ) -> tuple[Texts, np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], dict[str, Any]]:
        """One assistant message in each environment, side by side.

        Returns:
            (N texts, [N] float64 rewards, [N] bool terminated, [N] bool truncated, infos).

        Raises:
            EnvError: if an environment that has ended gets an action.
        """
        if len(actions) != self.num_envs:
            raise ConfigError(f"{len(actions)} actions for {self.num_envs} environments; give one for each")
        chosen = [n for n, action in enumerate(actions) if action is not None]
        if over := [n for n in chosen if self._ended[n]]:
            raise EnvError(f"environments {over} have ended; reset them with options={{'reset_mask': mask}}")
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminated, truncated = (np.zeros(self.num_envs, dtype=np.bool_) for _ in range(2))
        infos: dict[str, Any] = {}
        work = [self.cores[n].step(actions[n] or "") for n in chosen]
        results: list[StepResult] = on_loop(_all(work), step_limit(self.cores[0]))
        for n, result in zip(chosen, results, strict=True):
            self._observations[n] = as_text(result.messages)
            rewards[n], terminated[n], truncated[n] = result.reward, result.terminated, result.truncated
            self._ended[n] = result.terminated or result.truncated
            infos = self._add_info(infos, {**result.info, "messages": result.messages}, n)
        return tuple(self._observations), rewards, terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        """Give back every workspace and end every server."""
        on_loop(_all([core.aclose() for core in self.cores]), reset_limit(self.cores[0]))
        on_loop(self._hub.aclose(), reset_limit(self.cores[0]))

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        """Gymnasium's layout without its conversions, which would turn a missing score into a number."""
        for key, value in env_info.items():
            array = vector_infos.setdefault(key, np.full(self.num_envs, None, dtype=object))
            array[env_num] = value
            vector_infos.setdefault(f"_{key}", np.zeros(self.num_envs, dtype=np.bool_))[env_num] = True
        return vector_infos


async def _all(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results of all; if one raises, the others still end before it is raised."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
