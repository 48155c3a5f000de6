"""The tables of `parnas plan`."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from parnas.training.plan import GB, MARGIN, Machine, PhasePlan, Plan

DAY = 24  # hours


def show_plan(plan: Plan) -> None:
    """What each phase takes, and what that rests on."""
    console = Console()
    for phase in plan.phases:
        console.print(f"{phase.phase}: {phase.network}", style="bold", highlight=False)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column()
        table.add_column(justify="right")
        for name, value in [*memory_rows(phase, plan.machine), *work_rows(phase, plan.machine)]:
            table.add_row(name, value, style="dim" if name.startswith(" ") else None)
        console.print(table)
        if phase.fits is not None:
            verdict = f"{'fits' if phase.fits else 'does not fit'} in {plan.machine.memory_gb:g} GB"
            console.print(f"  {verdict}", style="green" if phase.fits else "red", highlight=False)
        for line in phase.advice:
            console.print(f"  - {line}", highlight=False)
        console.print()
    for note in plan.notes:
        console.print(f"* {note}", highlight=False)


def memory_rows(phase: PhasePlan, machine: Machine) -> Iterator[tuple[str, str]]:
    """Memory of one GPU by what holds it; what the step's peak is made of is indented."""
    rows = "row" if phase.rows == 1 else "rows"
    yield (
        f"memory of {'each of ' if machine.gpus > 1 else ''}{machine.gpus} GPU{'s' * (machine.gpus > 1)}",
        (f"{phase.rows} {rows}"),
    )
    for name, size in phase.bytes.items():
        yield name, gigabytes(size)
    yield "  activations kept for backward", gigabytes(phase.kept_bytes)
    yield "  the softmax's part of them", gigabytes(phase.softmax_bytes)
    yield "  gradients, as activations go", gigabytes(phase.gradient_bytes)
    yield "together", gigabytes(sum(phase.bytes.values()))
    yield f"with CUDA and {MARGIN:.0%} margin", gigabytes(phase.needed_bytes)


def work_rows(phase: PhasePlan, machine: Machine) -> Iterator[tuple[str, str]]:
    """Parameters, work, and time and price where they are known."""
    yield "", ""  # memory ends here
    yield "parameters", f"{phase.parameters:,}"
    yield "training FLOPs per token", f"{phase.flops_per_token / 1e6:,.1f} million"
    yield "tokens to train on", f"{phase.tokens:,}"
    if phase.tokens_per_s is None or phase.hours is None:
        return
    scaled = abs((phase.scaled_by or 1) - 1) > 0.005
    yield "tokens/s, scaled by FLOPs" if scaled else "tokens/s", f"{phase.tokens_per_s:,.0f}"
    yield "time", describe_hours(phase.hours)
    if machine.gpus > 1:
        yield "GPU hours", f"{machine.gpus * phase.hours:,.1f}"
    if phase.price is not None:
        yield "price", f"{phase.price:,.2f}"


def describe_hours(hours: float) -> str:
    """In the unit that suits: minutes, hours or days."""
    if hours < 1:
        return f"{hours * 60:.1f} minutes"
    return f"{hours:.1f} hours" if hours < 2 * DAY else f"{hours / DAY:,.1f} days"


def gigabytes(size: float) -> str:
    """A number of bytes, in units of 10^9, or of 10^6 where it is small."""
    return f"{size / GB:,.2f} GB" if size >= GB / 10 else f"{size / 1e6:,.1f} MB"
