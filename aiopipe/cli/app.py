"""The commands: what they take, and what is done with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from .. import __version__
from . import quantities, values
from .bench import Bench, measure
from .bench_report import Measured
from .devices import Found, find_devices
from .devices_of import BANDWIDTH, FLOPS, Simulated, hardware, links_of, memory_by_name
from .examples import find_examples, run_example
from .interrupt import CtrlC
from .outcome import ExitCode, UsageError, carry_out
from .plan import Request, plan_it, traced
from .plan_report import Planned
from .target import find, start_jax
from .timeline import read_timeline

__all__ = ["app"]

CODES = """Exit codes: 0 done, 1 failed, 2 wrong usage (also: no such module, function or device), 3 your function
failed, 4 it does not fit the devices, 130 interrupted."""

app = typer.Typer(
    help=f"aiopipe: JAX functions over several devices, behind await.\n\n{CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/cli.md has its fields.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Function = Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="Or path/to/file.py:function.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="SHAPE",
        help="8x128:float32, float32[8,128], a JSON tree of such shapes, or a name in the module. Once for each input.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What the function takes first: a name in the module (an array, a tree of them, or a function that makes "
        "one), MODULE:NAME, or shapes as for --input. Default: 'params' or 'weights' of the module.",
    ),
]
Devices = Annotated[str, typer.Option("--devices", "-d", metavar="A,B", help="In the order of the parts.")]
Split = Annotated[str, typer.Option(metavar="R,S", help="auto, or a share of the work for each device.")]
Place = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB=DEVICE", help="Where weights go, by their paths, instead of --split; the first counts."),
]
Copies = Annotated[str, typer.Option("--n-copies", "-n", metavar="N", help="Evaluations in flight; auto: what fits.")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="What each device may use: 16GB, or 16GB,512MiB.")]


def epilog(*lines: str) -> str:
    """Examples, one on a line of its own."""
    return "Examples:\n\n" + "\n\n".join(f"[dim]$[/dim] aiopipe {line}" for line in lines)


def version(asked: bool) -> None:
    """``--version``."""
    if asked:
        print(f"aiopipe {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Show it.")] = False,
) -> None:
    """All commands."""


@app.command(name="devices", epilog=epilog("devices", "devices --cpus 4 --json"))
def devices_command(
    cpus: Annotated[int, typer.Option(min=0, help="Have JAX make as many CPU devices.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> NoReturn:
    """List the devices of this machine and the backends that can be named."""

    def work(ctrl_c: CtrlC) -> Found:
        start_jax((), at_least=cpus)
        return find_devices()

    carry_out("devices", work, as_json=as_json, debug=debug)


@app.command(
    name="plan",
    epilog=epilog(
        "plan my_model:model --input 8x128 --devices cpu:0,cpu:1",
        "plan my_model.py:model -i 8x128:int32 --weights init --devices gpu:0,cpu:0 --compile",
        "plan my_model:model -i 8x128 --devices sim:8 --link 25GB/s --latency 5us --memory 16GB --flops 50T",
        "plan my_model:model -i '{\"ids\": \"8x128:int32\"}' --place 'layers/*=gpu:0' --place '*=cpu:0' -d gpu:0,cpu:0",
    ),
)
def plan_command(
    function: Function,
    inputs: Inputs = None,
    weights: Weights = None,
    state: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Of a function of (weights, state, *inputs), as for --input.")
    ] = None,
    devices: Devices = "cpu:0,cpu:1",
    split: Split = "auto",
    place: Place = None,
    n_copies: Copies = "4",
    memory: Memory = None,
    link: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of each link between two devices: 25GB/s. Default: no limit.")
    ] = None,
    host_link: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of each link from the host. Default: no limit.")
    ] = None,
    latency: Annotated[str | None, typer.Option(metavar="TIME", help="Of each copy: 5us. Default: none.")] = None,
    flops: Annotated[str, typer.Option(metavar="RATE", help="Of simulated devices: 50T, or one for each.")] = FLOPS,
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Of their memories: 1.5TB/s.")] = BANDWIDTH,
    evaluations: Annotated[int | None, typer.Option(min=2, help="How many are estimated. Default: 64 or more.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile, so that temporaries are known.")] = False,
    detail: Annotated[int, typer.Option(min=0, max=2, help="Of the plan: 0 a line, 1 a table, 2 every node.")] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> NoReturn:
    """Show what would run where, how long it would take and whether it fits, without running it.

    --devices sim:8 plans for eight devices that need not exist. Times are estimates from the operations and bytes of
    each node and the devices' assumed speeds: ratios mean more than seconds.
    """

    def work(ctrl_c: CtrlC) -> Planned:
        specs = quantities.specs(devices)
        links = links_of(link, host_link, latency)
        start_jax(specs)
        target = find(function)
        graph = traced(
            target,
            values.weights_of(weights, target, real=False),
            values.inputs_of(inputs or (), target, real=False),
            values.state_of(state, target),
        )
        there = hardware(specs, memory=memory, links=links, simulated=Simulated(flops, bandwidth))
        if compile and there.simulated:
            raise UsageError("--compile: simulated devices have no compiler")
        names = [device.name for device in there.devices]
        request = Request(
            graph,
            there,
            quantities.shares(split, there.named),
            quantities.places(place, names) if place else None,
            quantities.copies(n_copies),
            evaluations,
            compile,
            _detail(detail),
        )
        return plan_it(request, ctrl_c)

    carry_out("plan", work, as_json=as_json, debug=debug)


@app.command(
    name="bench",
    epilog=epilog(
        "bench my_model:model --input 8x128",
        "bench my_model.py:model -i 8x128:int32 --weights init --devices gpu:0,gpu:1 --rounds 15",
        "bench my_model:model -i batch --devices cpu:0,cpu:1 --split 2,1 --json",
    ),
)
def bench_command(
    function: Function,
    inputs: Inputs = None,
    weights: Weights = None,
    devices: Devices = "cpu:0,cpu:1",
    split: Split = "auto",
    place: Place = None,
    n_copies: Copies = "4",
    memory: Memory = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 9,
    evaluations: Annotated[int | None, typer.Option(min=2, help="In a round. Default: half a second's.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> NoReturn:
    """Measure the throughput of a pipeline against the loop written by hand and against one device.

    The loop is device_put and a jitted call for each part, with as many results in flight; on one device the whole
    function is jitted. All are measured in turn, and ratios are medians over the rounds. Inputs and weights that are
    given as shapes are filled with random numbers, and with zeros where they are integers.
    """

    def work(ctrl_c: CtrlC) -> Measured:
        specs = quantities.specs(devices)
        if any(spec.partition(":")[0] == "sim" for spec in specs):
            raise UsageError("--devices: simulated devices take no time that could be measured; try aiopipe plan")
        start_jax(specs)
        target = find(function)
        bench = Bench(
            target,
            values.weights_of(weights, target, real=True),
            values.inputs_of(inputs or (), target, real=True),
            specs,
            quantities.places(place, specs) if place else quantities.shares(split, len(specs)),
            quantities.copies(n_copies),
            memory_by_name(memory, specs),
            rounds,
            evaluations,
        )
        return ctrl_c.run(measure(bench))

    carry_out("bench", work, as_json=as_json, debug=debug)


@app.command(name="timeline", epilog=epilog("timeline run.json", "timeline run.json.gz --plot run.png --json"))
def timeline_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What Timeline.save has written.")],
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: a PNG, SVG or PDF file.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> NoReturn:
    """Show from a saved timeline how busy each device was and how much they overlapped."""
    carry_out("timeline", lambda _: read_timeline(file, plot), as_json=as_json, debug=debug)


@app.command(
    name="serve",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=epilog("serve --port 8080 --devices gpu:0,gpu:1", "serve --help"),
)
def serve_command(context: typer.Context) -> NoReturn:
    """Serve a language model and a sentence encoder over HTTP, as OpenAI's interface has it; see serve --help."""
    raise typer.Exit(_example("server", context.args, "aiopipe serve"))


@app.command(
    name="example",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=epilog("example", "example ggml_style", 'example embed --devices cpu:0,cpu:1 --query "open a file"'),
)
def example_command(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which; without it they are listed.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> NoReturn:
    """Run an example, or list them. What comes behind its name is for the example; try NAME --help."""
    if name is None:
        carry_out("example", lambda _: find_examples(), as_json=as_json, debug=debug)
    raise typer.Exit(_example(name, context.args, f"aiopipe example {name}"))


def _example(name: str, argv: list[str], command: str) -> int:
    """Its exit code; it has its own ways with Ctrl-C and with errors."""
    try:
        return run_example(name, argv, command)
    except (UsageError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return int(ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED)


def _detail(level: int) -> Literal[0, 1, 2]:
    return 0 if level == 0 else 1 if level == 1 else 2
