"""What a slow judge costs a training step: the same run with judges that answer at once and after 300 ms, alternating.

    python benchmarks/judge_overlap.py

Real parts (Ray, vLLM, MCP server, learner) but for the judge, which is simulated and waits. ``--groups`` groups are in flight: half
of them in the step that is collected, half already started for the next (max_staleness=1). Printed: seconds of a step, and the
ratio of slow to fast over the pairs, median and range.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import ray

from arenarl.algorithms.arena_rl import ArenaRLConfig

MODEL = Path(__file__).parent.parent / "experiments" / "tiny_agent" / "model"


def config(args: argparse.Namespace, latency_s: float) -> ArenaRLConfig:
    return (
        ArenaRLConfig()
        .environment("arenarl.envs.travel:TravelTasks")
        .agent(model_path=str(MODEL), max_model_len=768, max_num_seqs=96, max_tokens=64)
        .training(lr=1e-5, group_size=8, groups_per_step=args.groups // 2, max_staleness=1)
        .env_runners(num_env_runners=1)
        .judging(judge="arenarl.simulation:SimulatedJudge", judge_config={"latency_s": latency_s})
        .arena(topology=args.topology)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how much of a judge's latency a step shows.")
    parser.add_argument("--groups", type=int, default=8, help="groups in flight")
    parser.add_argument("--latency", type=float, default=0.3, help="seconds of a judge's answer")
    parser.add_argument("--steps", type=int, default=8, help="steps of a block; the first is left out")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--topology", default="even_graph")
    args = parser.parse_args()
    ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
    algorithms = {latency: config(args, latency).build_algo() for latency in (0.0, args.latency)}
    ratios = []
    for pair in range(args.pairs):
        seconds = {}
        for latency in sorted(algorithms, reverse=bool(pair % 2)):
            steps = []
            for _ in range(args.steps):
                algorithms[latency].train()
                steps.append(algorithms[latency].last_metrics["time/step"])
            seconds[latency] = statistics.median(steps[1:])
        ratios.append(seconds[args.latency] / seconds[0.0])
        print(f"at once {seconds[0.0]:.2f} s, after {args.latency:g} s {seconds[args.latency]:.2f} s", flush=True)
    for algorithm in algorithms.values():
        algorithm.stop()
    print(
        json.dumps(
            {
                "name": "judge_latency_shown",
                "ratio": round(statistics.median(ratios), 3),
                "low": round(min(ratios), 3),
                "high": round(max(ratios), 3),
                "pairs": len(ratios),
            }
        )
    )


if __name__ == "__main__":
    main()
