"""The report: which GPU, how fast, how many dollars; from result files, prices and the published comparison.

    python benchmark/report.py benchmark/results/*.json --out report

Writes report.md, three pictures, and report.html, which holds all of it in one file.
"""

import argparse
import base64
import csv
import html
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmark import figures, projection
from benchmark.audit import FASTER_WITH_AMP, audit, frames_of, read_published
from benchmark.command_line import Parser, refuse
from benchmark.figures import KINDS, Number
from benchmark.results import FRAME_SKIP, ForeignFile, Result, Setting, read
from common.cost import PRICES, age_of, dollars_per_hour, find_instance, read_prices
from common.errors import UsageError
from common.files import replacing

HERE = Path(__file__).parent
LEARNING_CURVE = HERE / "results" / "CleanRL_ppo_atari.csv"
ENVS = (8, 16, 32, 64)  # that the projection tries


@dataclass(frozen=True)
class Money:
    """What the machine at hand costs an hour, and where that comes from."""

    dollars_per_hour: float | None
    words: str


@dataclass(frozen=True)
class Host:
    """A machine that is not here, with its card."""

    name: str
    gpu: str
    vcpus: int
    tflops: float
    precision: str


def add_money_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--price-per-hour", type=float, help="US dollars of this machine")
    parser.add_argument("--instance", help="what this machine is: provider:name[@region], priced by prices.csv")
    parser.add_argument("--spot", action="store_true", help="with --instance: its spot price")
    parser.add_argument("--watts", type=float, help="of an own machine; by default what NVML measured of its card")
    parser.add_argument("--price-per-kwh", type=float, help="US dollars: electricity for an own machine")


def money_of(args: argparse.Namespace, prices: list[dict[str, str]], power: float | None = None) -> Money:
    """From the flags; `power`: watts that were measured.

    Raises:
        UsageError: flags that are wrong, or a price that nobody knows.
    """
    for name in ("price_per_hour", "watts", "price_per_kwh"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e6:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be positive")
    ways = [name for name in ("price_per_hour", "instance", "price_per_kwh") if getattr(args, name) is not None]
    if len(ways) > 1:
        raise UsageError(f"{' and '.join('--' + name.replace('_', '-') for name in ways)}: one price is enough")
    if args.spot and args.instance is None:
        raise UsageError("--spot means nothing without --instance")
    if args.watts is not None and args.price_per_kwh is None:
        raise UsageError("--watts means nothing without --price-per-kwh")
    if args.price_per_hour is not None:
        return Money(args.price_per_hour, "as given")
    if args.instance is not None:
        row = find_instance(args.instance, prices)
        price = dollars_per_hour(row, args.spot)
        if price is None:
            raise UsageError(f"--instance {args.instance}: no such price in {PRICES.name}; use --price-per-hour")
        return Money(price, f"{args.instance}{', spot' if args.spot else ''}, {age_of(row)}")
    if args.price_per_kwh is not None:
        watts = args.watts if args.watts is not None else power
        if watts is None:
            return Money(None, "no power was measured: give --watts")
        how = "given" if args.watts is not None else "measured of the card alone"
        return Money(watts / 1000 * args.price_per_kwh, f"{watts:.0f} W {how}, ${args.price_per_kwh:g} a kWh")
    return Money(None, "no --price-per-hour, --instance or --price-per-kwh was given")


def read_gpus() -> dict[str, dict[str, str]]:
    with open(HERE / "gpus.csv", encoding="utf-8", newline="") as file:
        return {row["gpu"]: row for row in csv.DictReader(line for line in file if not line.startswith("#"))}


def host_of(row: dict[str, str], gpus: dict[str, dict[str, str]]) -> Host | None:
    """A row of prices as a host; TF32 where the card has it. None for cards that gpus.csv does not know."""
    if (card := gpus.get(row["gpu"])) is None or row["gpus"] not in ("", "1"):
        return None
    precision = "tf32" if card["tf32"] else "fp32"
    name = f"{row['provider']}:{row['instance']}"
    return Host(name, row["gpu"], int(row["vcpus"] or card["vcpus"]), float(card[precision]), precision)


HERE_FIRST, DQN = ("ppo_atari fp32", projection.SWEEP.format(8)), "dqn_atari fp32"  # of the machine at hand


class Report:
    """Everything that the pages and pictures show, computed once."""

    def __init__(self, results: list[Result], prices: list[dict[str, str]], frames: float, money: Money) -> None:
        self.results, self.prices, self.frames, self.money = results, prices, frames, money
        self.here = results[0]
        self.published = read_published()
        self.model = projection.calibrate(self.here)
        self.checks = {}
        for result in results:
            if model := projection.calibrate(result):
                self.checks[result.name()] = projection.check(result, model)
        every = [one for checks in self.checks.values() for one in checks]
        self.error = projection.error(every)
        gpus = read_gpus()
        hosts = [(row, host_of(row, gpus)) for row in prices]
        first = {}  # one region is enough
        for row, host in hosts:
            if host and host.name not in first:
                first[host.name] = (row, host)
        self.hosts = list(first.values())
        self.unknown_cards = sorted({row["gpu"] for row, host in hosts if host is None})

    def project(self, host: Host) -> tuple[int, float, dict[str, float]]:
        """The number of environments that is fastest, agent steps a second, microseconds of each part."""
        model = self.model.on(host.vcpus, host.tflops)
        best = max(ENVS, key=model.sps)
        return best, model.sps(best), model.parts(best)

    def priced(self) -> list[Setting]:
        """The settings of this machine whose job is priced: PPO, with default sizes if they were measured, DQN."""
        settings = self.here.settings
        ppo = [settings[name] for name in HERE_FIRST if name in settings][:1]
        return ppo + ([settings[DQN]] if DQN in settings else [])

    def hours(self, frames_per_second: float) -> float:
        return self.frames / frames_per_second / 3600

    # ---- tables: a title, words, a head, rows of cells

    def measured(self) -> tuple[str, str, list[str], list[list[object]]]:
        rows = []
        for one in self.here.settings.values():
            if one.kind == "floor":
                continue
            shares = [one.share(part) for part in ("environment", "inference", "learning")]
            floor = self.here.ratio(one.name, f"floor {one.script}") if one.name == f"{one.script} fp32" else None
            memory, on_gpu = one.largest("peak_memory_mib"), one.largest("gpu_memory_mib")
            rows.append(
                [
                    one.name,
                    one.num_envs,
                    Number(one.sps.median, "measured"),
                    f"{one.sps.low:,.0f} to {one.sps.high:,.0f}",
                    Number(one.frames, "measured") if one.frames else "-",
                    " / ".join("-" if share is None else f"{share:.0%}" for share in shares),
                    Number(floor.median, "measured", 2) if floor else "-",
                    "-" if memory is None else Number(memory, "measured"),
                    "-" if on_gpu is None else Number(on_gpu, "measured"),
                ]
            )
        rows += [[name, "-", f"failed: {words}", *["-"] * 6] for name, words in self.here.failed.items()]
        head = ["setting", "envs", "agent steps/s", "lowest to highest window", "frames/s"]
        head += ["environment / inference / learning", "of the floor", "peak MiB", "GPU MiB"]
        machine = self.here.machine
        packages = machine["packages"]
        words = (
            f"{self.here.name()}, {machine['torch_threads']} torch threads, torch {packages['torch']}, "
            f"CUDA {machine['cuda'] or 'none'}, driver {machine.get('driver') or 'none'}, ale-py {packages['ale-py']}, "
            f"measured on {self.here.measured_on}. An agent step is {FRAME_SKIP} frames on Atari. The floor is the sum "
            "of environment, inference and learning, each alone."
        )
        return "Measured here", words, head, rows

    def precision(self) -> tuple[float, str] | None:
        """How many times as fast mixed precision is, and which."""
        for name in ("amp", "bf16"):
            if ratio := self.here.ratio(f"ppo_atari {name}", projection.SWEEP.format(8)):
                return ratio.median, name
        return None

    def peers(self) -> tuple[str, str, list[str], list[list[object]]] | None:
        rows = []
        for script in ("ppo_atari", "dqn_atari", "ppo_continuous"):
            for one in self.here.settings.values():
                against = self.here.ratio(one.name, f"sb3 {script}")
                full = one.name in {f"{script} fp32", f"{script} fp32, 1 env", f"{script} compiled"}
                if against and one.kind == "script" and full:
                    peer = self.here.settings[f"sb3 {script}"]
                    rows.append(
                        [
                            one.name,
                            Number(one.sps.median, "measured"),
                            Number(peer.sps.median, "measured"),
                            f"{one.num_envs} / {peer.num_envs}",
                            Number(against.median, "measured", 2),
                            f"{against.low:.2f} to {against.high:.2f}",
                            len(peer.rounds),
                        ]
                    )
        head = ["setting", "agent steps/s", "Stable-Baselines3", "envs of each", "ratio", "over rounds", "rounds"]
        words = "Speeds are medians over all windows. Ratios, taken within rounds, need not be those of medians."
        return ("Beside Stable-Baselines3", words, head, rows) if rows else None

    def jobs(self) -> tuple[str, str, list[str], list[list[object]]]:
        """The job on every machine: published, measured here, projected."""
        rows = []
        for row in self.published:
            fps = float(row["fps"])
            name = f"{row['device']}, the article"
            cost = Number(float(row["cost"]), "published", prefix="$")
            rows.append([name, "-", Number(fps, "published"), Number(float(row["hours"]), "published", 1), cost, "-"])
            if row["rate"]:
                hours, rate = self.hours(fps), float(row["rate"])
                again = Number(hours * rate, "recomputed", 2, prefix="$")
                rows.append([f"{row['device']}, this job", "-", "", Number(hours, "recomputed", 1), again, f"${rate}"])
        here = self.priced()
        for default in here:
            hours = self.hours(default.frames)
            price = self.money.dollars_per_hour
            cost = Number(price and hours * price, "recomputed", 2, prefix="$")
            rows.append(
                [
                    f"here, {default.script}: {self.here.name()}",
                    default.num_envs,
                    Number(default.frames, "measured"),
                    Number(hours, "recomputed", 1),
                    cost,
                    self.money.words,
                ]
            )
        if self.model:
            for row, host in self.hosts:
                num_envs, sps, _ = self.project(host)
                fps = sps * FRAME_SKIP
                hours = self.hours(fps)
                for kind, spot in (("on demand", False), ("spot", True)):
                    if (price := dollars_per_hour(row, spot)) is not None:
                        rows.append(
                            [
                                f"{host.name} ({host.gpu}, {host.vcpus} vCPUs), {kind}",
                                num_envs,
                                Number(fps, "projected", error=self.error),
                                Number(hours, "projected", 1, error=self.error),
                                Number(hours * price, "projected", 2, prefix="$", error=self.error),
                                f"${price:.3f} an hour, {age_of(row)}",
                            ]
                        )
        head = ["machine", "envs", "frames/s", "hours", "cost", "price"]
        words = (
            f"Atari for {self.frames / 1e6:,.1f} million frames, with PPO where nothing else is said. The article does "
            "not say whether its FPS are frames or agent steps; here they are taken for frames."
        )
        if not here:
            words += f" Nothing measured here can be priced: {HERE_FIRST[0]} and {DQN} are missing."
        return "What the job costs", words, head, rows

    def audited(self) -> tuple[str, str, list[str], list[list[object]]]:
        rows = [
            [one.what, one.published, one.recomputed, one.verdict, one.words]
            for one in audit(self.published, self.prices)
        ]
        claim = Number(FASTER_WITH_AMP, "published", 2, unit=" x")
        if faster := self.precision():
            on_gpu = self.here.machine["gpu"] is not None
            words = f"{faster[1]} against fp32, the same flags, on this machine"
            words += "" if on_gpu else ": a CPU, which says nothing about a GPU"
            verdict = ("agrees" if faster[0] >= FASTER_WITH_AMP else "does not agree") if on_gpu else "not tested"
            rows.append(["AMP is about 30% faster", claim, Number(faster[0], "measured", 2, unit=" x"), verdict, words])
        else:
            rows.append(["AMP is about 30% faster", claim, "-", "not tested", "not measured in this result file"])
        sweep = projection.sweep(self.here)
        if len(sweep) > 1:
            cores = self.here.machine["available_cores"]
            best = max(sweep, key=lambda num_envs: self.here.settings[sweep[num_envs]].sps.median)
            per_core = Number(best / cores, "measured", 1)
            speeds = "; ".join(f"{n}: {self.here.settings[name].sps.median:,.0f}" for n, name in sweep.items())
            verdict = "agrees" if 2 <= best / cores <= 4 else "does not agree"
            words = f"environments: agent steps/s on {cores} cores: {speeds}; differences within the spread say nothing"
            rows.append(["2 to 4 workers a core", "2 to 4", per_core, verdict, words])
        head = ["figure or claim", "published", "computed or measured", "verdict", "why"]
        return "The published comparison, audited", "", head, rows

    def projected(self) -> tuple[str, str, list[str], list[list[object]]] | None:
        if not self.model:
            return None
        rows = []
        for _, host in self.hosts:
            for num_envs in (8, self.project(host)[0]):
                model = self.model.on(host.vcpus, host.tflops)
                parts = model.parts(num_envs)
                total = sum(parts.values())
                rows.append(
                    [
                        f"{host.name}: {host.gpu} {host.precision}, {host.vcpus} vCPUs",
                        num_envs,
                        Number(model.sps(num_envs), "projected", error=self.error),
                        " / ".join(f"{parts[part] / total:.0%}" for part in ("environment", "inference", "learning")),
                    ]
                )
        model = self.model
        unknown = (
            f" No row for {', '.join(self.unknown_cards)}: not in gpus.csv, or more than one card."
            if self.unknown_cards
            else ""
        )
        words = (
            f"Time of a step = emulation + inference + learning, their sum, because each waits for the other. "
            f"Calibrated here: an emulator's step {model.emulation:,.0f} us of one core, a call of the network "
            f"{model.call:,.0f} us and {model.observation:,.0f} us an observation, {model.rate / 1e3:,.0f} GFLOP/s in "
            f"learning. For cards {projection.EFFICIENCY:.0%} of the data sheet's peak and {projection.LAUNCH:g} us an "
            f"operation are assumed; nobody has measured a GPU with this program yet, so the error printed, that of "
            f"settings which the model had not seen on CPUs, is the least it can be. vCPUs are taken to be as fast as "
            f"this machine's cores; where the file of prices does not say how many, gpus.csv is taken.{unknown}"
        )
        return "Projection", words, ["host", "envs", "agent steps/s", "environment / inference / learning"], rows

    def unseen(self) -> tuple[str, str, list[str], list[list[object]]] | None:
        rows = [
            [
                machine,
                one.name,
                Number(one.measured, "measured"),
                Number(one.predicted, "projected"),
                f"{one.error:+.0%}",
            ]
            for machine, checks in self.checks.items()
            for one in checks
        ]
        head = ["machine", "setting the model had not seen", "measured", "projected", "error"]
        words = (
            f"The largest error is printed with each projection: {self.error:.0%}." if self.error is not None else ""
        )
        if without := [one.name() for one in self.results if one.name() not in self.checks]:
            words += f" Not used: {'; '.join(without)}, without runs of ppo_atari.py with two numbers of environments."
        return ("How far the projection is off", words, head, rows) if rows else None

    def choice(self) -> list[str]:
        """What the hosts' processors mean for the choice."""
        if not self.model:
            return ["No projection: the result file here lacks runs of ppo_atari.py with two numbers of environments."]
        lines = []
        for row, host in self.hosts:
            num_envs, sps, parts = self.project(host)
            share = parts["environment"] / sum(parts.values())
            price = dollars_per_hour(row, spot=False)
            infinitely = 1e6 / (parts["environment"] + parts["inference"])
            lines.append(
                f"{host.name} ({host.vcpus} vCPUs): emulation is {share:.0%} of a step with {num_envs} environments; a "
                f"card that learned in no time would make it {infinitely / sps:.1f} times as fast. "
                f"~${price / sps / 3600 * 1e6:.2g} a million agent steps."
                if price
                else f"{host.name} ({host.vcpus} vCPUs): emulation is {share:.0%} of a step; its price is unknown."
            )
        return lines

    def tables(self) -> list[tuple[str, str, list[str], list[list[object]]]]:
        every = [self.measured(), self.peers(), self.jobs(), self.audited(), self.projected(), self.unseen()]
        return [table for table in every if table]


# ---- pages

LEGEND = [
    ("published", Number(1200, "published")),
    ("recomputed", Number(146.88, "recomputed", 2)),
    ("measured", Number(275, "measured")),
    ("projected", Number(1900, "projected", error=0.2)),
]
PICTURES = {
    "frames_per_second.png": "Emulator frames a second",
    "dollars.png": "Dollars for the job",
    "return_against_dollars.png": "Return against dollars",
}


def to_markdown(report: Report, pictures: list[str]) -> str:
    lines = ["# Which GPU, how fast, how many dollars", ""]
    lines += ["Four kinds of numbers, which look different everywhere:", ""]
    lines += [f"- {number.markdown()}: {kind}, {KINDS[kind]}" for kind, number in LEGEND]
    for title, words, head, rows in report.tables():
        lines += ["", f"## {title}", ""]
        if words:
            lines += [words, ""]
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(figures.markdown(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    lines += ["", "## What the hosts mean for the choice", ""] + [f"- {line}" for line in report.choice()]
    for name in pictures:
        lines += ["", f"![{PICTURES[name]}]({name})"]
    return "\n".join(lines) + "\n"


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 14px } .wide { overflow-x: auto }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #d8dee4; text-align: left; vertical-align: top }
th { background: #f3f5f7 } img { max-width: 100% }
.published { color: #6b7280; font-style: italic } .published::after { content: " (p)"; font-size: 11px }
.recomputed { color: #8a4b00 } .recomputed::before { content: "= " }
.measured { color: #0b5d2a; font-weight: 700 }
.projected { color: #1d4ed8; border-bottom: 2px dotted #1d4ed8 } .projected::before { content: "~ " }
.unknown { color: #9ca3af }
"""


def to_page(report: Report, pictures: dict[str, bytes]) -> str:
    parts = ["<h1>Which GPU, how fast, how many dollars</h1>", "<ul>"]
    parts += [f"<li>{number.html()}: {kind}, {html.escape(KINDS[kind])}</li>" for kind, number in LEGEND] + ["</ul>"]
    for name, data in pictures.items():
        source = base64.b64encode(data).decode()
        parts.append(f'<p><img alt="{PICTURES[name]}" src="data:image/png;base64,{source}"></p>')
    for title, words, head, rows in report.tables():
        parts += [f"<h2>{html.escape(title)}</h2>", f"<p>{html.escape(words)}</p>", '<div class="wide"><table><tr>']
        parts += [f"<th>{html.escape(word)}</th>" for word in head] + ["</tr>"]
        for row in rows:
            parts.append("<tr>" + "".join(f"<td>{figures.to_html(cell)}</td>" for cell in row) + "</tr>")
        parts.append("</table></div>")
    parts += ["<h2>What the hosts mean for the choice</h2><ul>"]
    parts += [f"<li>{html.escape(line)}</li>" for line in report.choice()] + ["</ul>"]
    head = f'<meta charset="utf-8"><title>Which GPU, how fast, how many dollars</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def build(results: list[Result], out: Path, prices: list[dict[str, str]], frames: float, money: Money) -> list[Path]:
    """Write the report of the first result; the others only test the projection. Returns the files.

    Raises:
        OSError: the folder cannot be written.
    """
    report = Report(results, prices, frames, money)
    out.mkdir(parents=True, exist_ok=True)
    pictures = {}
    try:
        from benchmark.pictures import draw
    except ImportError as error:
        print(f"no pictures: {error}; pip install -r requirements.txt", file=sys.stderr)
    else:
        pictures = draw(report)
    texts = {"report.md": to_markdown(report, list(pictures)), "report.html": to_page(report, pictures)}
    files = {**pictures, **{name: text.encode() for name, text in texts.items()}}
    for name, data in files.items():
        with replacing(out / name) as file:
            file.write(data)
    print("\n".join(f"written to {out / name}" for name in files))
    return [out / name for name in files]


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="result files; the first one is the machine at hand")
    parser.add_argument("--frames", type=float, default=frames_of(read_published()[0]), help="of the job")
    parser.add_argument("--out", type=Path, default=Path("report"))
    add_money_flags(parser)
    args = parser.parse_args()
    if not 0 < args.frames < 1e15:
        refuse("--frames must be positive")
    found, broken = [], []
    for path in args.results:
        try:
            found.append(read(path))
        except ForeignFile as error:
            broken.append(str(error))
    for line in broken:
        print(f"left out: {line}", file=sys.stderr)
    if not found:
        refuse("no result file that can be used")
    try:
        prices = read_prices(PRICES)
        powers = [power for one in found[0].settings.values() if (power := one.largest("power_w"))]
        money = money_of(args, prices, max(powers, default=None))
        build(found, args.out, prices, args.frames, money)
    except UsageError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"--out: cannot write into {args.out}: {error.strerror}")
    if broken:
        sys.exit(1)


if __name__ == "__main__":
    main()
