"""How many rollout nodes feed one learner of `ppo_atari_ray.py`: on paper. Nothing here ran on a GPU or two machines.

    python benchmark/cluster.py
    python benchmark/cluster.py --cores 32 --num-steps 256

An iteration is a rollout of `num_steps` steps in every environment, on all nodes at once, and then the update; rollouts
wait for its weights. With n nodes that makes

    1 / (1 / (n * node) + 1 / network + 1 / learner)          agent steps a second

which nears the rate of learner and network and never reaches it. *Saturated* is where a rollout takes no longer than
its update, n * node >= learner: from there on another node shortens the smaller part of an iteration.

node: emulators and inference of one node. Measured is an actor, on all cores of the machine of a result file: its
shares of time in `ppo_atari.py`, between the measured numbers of environments by the model of
`benchmark/projection.py`. A node is taken to be as many such machines as fit into its cores, which no memory bus
promises.

learner: projected from the card's peak with that module's assumptions, 25% of the peak and 10 microseconds a kernel,
which nobody has checked on a GPU. TF32 where the card has it (the default), fp16 with --amp. The larger batch of more
nodes spreads the kernels' own time over more steps. Advantages and the way from memory to the card are left out.

network: bytes are counted. Each agent step brings one frame of 84 x 84 bytes and NUMBERS bytes (action, log-
probability, value, reward, ends) to the learner, each environment two stacks a rollout (the first observations, and the
last ones in its state), and each node takes the weights once an iteration. A share is sent when it is played, and the
learner's line of GBIT Gbit/s carries nothing else. `doctor.py --peer` measures what it carries.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmark import projection
from benchmark.command_line import Parser, refuse
from benchmark.projection import EPOCHS, MINIBATCHES, PPO, Model
from benchmark.report import read_gpus
from benchmark.results import ForeignFile, read

MEASURED = Path(__file__).parent / "results" / "amd-epyc-avx512-2-cores.json"
CARDS = ("RTX 3090", "V100", "A100")
FRAME, NUMBERS = 84 * 84, 39  # bytes an agent step
STACKS = 2 * 4 * FRAME  # bytes an environment and rollout
GBIT = (1.0, 10.0, 25.0)  # Gbit/s of the learner's line
# of the network of Mnih et al. 2015 with 4 actions and a value; 4 bytes each
PARAMETERS = (
    (8 * 8 * 4 + 1) * 32 + (4 * 4 * 32 + 1) * 64 + (3 * 3 * 64 + 1) * 64 + (3136 + 1) * 512 + (512 + 1) * (4 + 1)
)
WEIGHTS = 4 * PARAMETERS
MOST = 1000  # nodes


@dataclass(frozen=True)
class Cluster:
    """Rollout nodes of one kind, and the size of their rollouts."""

    model: Model  # of the measured machine, which is one actor
    cores: int  # of a node
    num_steps: int
    envs_per_actor: int

    @property
    def actors(self) -> int:
        """On a node."""
        return self.cores // self.model.cores

    @property
    def node(self) -> float:
        """Agent steps a second of one node, without learning."""
        parts = self.model.parts(self.envs_per_actor)
        return self.actors * 1e6 / (parts["environment"] + parts["inference"])

    def batch(self, nodes: int) -> int:
        """Agent steps of an iteration."""
        return nodes * self.actors * self.envs_per_actor * self.num_steps

    def learner(self, tflops: float, nodes: int) -> float:
        """Agent steps a second that a card's updates alone take in."""
        card = self.model.on(self.cores, tflops)
        return 1e6 / (PPO / card.rate + EPOCHS * MINIBATCHES * card.minibatch / self.batch(nodes))

    @property
    def step_bytes(self) -> float:
        """To the learner, an agent step."""
        return FRAME + NUMBERS + STACKS / self.num_steps

    def together(self, tflops: float, nodes: int, gbit: float) -> float:
        """Agent steps a second; rollout, network and update in turn."""
        network = (self.step_bytes + self.weights(nodes)) * 8e-9 / gbit
        return 1 / (1 / (nodes * self.node) + network + 1 / self.learner(tflops, nodes))

    def saturated(self, tflops: float) -> int | None:
        """The fewest nodes whose rollout takes no longer than the update; None: more than MOST."""
        fits = (nodes for nodes in range(1, MOST + 1) if nodes * self.node >= self.learner(tflops, nodes))
        return next(fits, None)

    def weights(self, nodes: int) -> float:
        """Bytes of weights that leave the learner, an agent step."""
        return nodes * WEIGHTS / self.batch(nodes)


def table(cluster: Cluster, gpus: dict[str, dict[str, str]]) -> list[str]:
    lines = [
        "| learner | takes in alone, steps/s (projected) | nodes that saturate it "
        f"| together, steps/s (projected), at {', '.join(f'{gbit:g}' for gbit in GBIT)} Gbit/s "
        "| into the learner, an iteration | weights out of it |",
        "|---|---|---|---|---|---|",
    ]
    for name in CARDS:
        for flags, column in (("", "tf32" if gpus[name]["tf32"] else "fp32"), (" `--amp`", "fp16")):
            tflops = float(gpus[name][column])
            card = f"{name}{flags}, {column}"
            nodes = cluster.saturated(tflops)
            if nodes is None:
                lines.append(f"| {card} | | more than {MOST} | | | |")
                continue
            together = ", ".join(f"{cluster.together(tflops, nodes, gbit):,.0f}" for gbit in GBIT)
            arrives = cluster.batch(nodes) * cluster.step_bytes / 1e6
            lines.append(
                f"| {card} | {cluster.learner(tflops, nodes):,.0f} | {nodes} | {together} "
                f"| {arrives:,.0f} MB | {nodes * WEIGHTS / 1e6:,.0f} MB |"
            )
    return lines


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="?", default=MEASURED, help="a file of benchmark/run.py")
    parser.add_argument("--cores", type=int, default=16, help="of a rollout node")
    parser.add_argument("--num-steps", type=int, default=128, help="of a rollout, in each environment")
    parser.add_argument("--envs-per-actor", type=int, default=5)
    args = parser.parse_args()
    try:
        result = read(args.result)
    except ForeignFile as error:
        refuse(str(error))
    model = projection.calibrate(result)
    if model is None:
        refuse(f"{args.result}: no runs of ppo_atari.py with two numbers of environments, to take rates from")
    for name in ("num_steps", "envs_per_actor"):
        if getattr(args, name) < 1:
            refuse(f"--{name.replace('_', '-')} {getattr(args, name)}: must be positive")
    if args.cores < model.cores or args.cores % model.cores:
        refuse(f"--cores {args.cores}: an actor was measured on {model.cores}, so a multiple of that")
    cluster = Cluster(model, args.cores, args.num_steps, args.envs_per_actor)
    worst = projection.error(projection.check(result, model))
    actor = cluster.node / cluster.actors
    print(f"An actor, {args.envs_per_actor} environments on {result.name()}: {actor:,.0f} agent steps/s of rollout")
    print(f"(measured {result.measured_on}, {args.result.name}; the model's error there: up to {worst:.0%}).")
    print(f"A node of {args.cores} cores, {cluster.actors} actors: {cluster.node:,.0f} agent steps/s, if that many")
    print(f"actors do not slow each other down. {cluster.step_bytes:,.0f} bytes an agent step go to the learner,")
    print(
        f"{cluster.weights(1):,.0f} come back as weights: {WEIGHTS / 1e6:.2f} MB to each node an iteration (counted)."
    )
    print()
    print(*table(cluster, read_gpus()), sep="\n")


if __name__ == "__main__":
    main()
