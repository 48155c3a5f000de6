"""Write what ending trials early saves into docs/tuning.md, from its benchmark: `python docs/make/tuning.py`."""

from pathlib import Path
from typing import Any

from performance import RESULTS

from parnas.runs.files import read_json, write_text

PAGE = Path(__file__).resolve().parents[1] / "tuning.md"
BEGIN, END = "<!-- pruners: begin -->", "<!-- pruners: end -->"


def render() -> str:
    """Return the page with a new block between its markers."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{render_block(read_json(RESULTS / 'tuning_pruners-cpu.json'))}\n{END}{after}"


def render_block(result: dict[str, Any]) -> str:
    """Return the description of the study, its table, and the caveats."""
    config, steps, trials = result["config"], result["validated_at"], result["trials"]
    model = f"`{config['model']['arch']}` of width {config['model']['d_model']} on `{config['data']['corpus']}`"
    *others, last = (f"`{key}`" for key in result["space"])
    mild, *stricter = (record["nats_behind"] for record in result["records"])
    return "\n".join(
        [
            f"The table replays a study of {trials} trainings of {model}, {steps[-1]} steps each with",
            f"{len(steps)} validations, in {result['orders']} orders for each rule. {', '.join(others)} and {last} were tuned.",
            "*Steps trained* is the share of all steps, *best trial kept* the share of orders in which the best trial was not pruned,",
            "*nats behind* the mean difference between the final losses of the selected trial and of the best trial, in nats per token.",
            "",
            result["tables"][0].partition("\n\n")[2],
            "",
            f"At the first validation, the trial that was best in the end was number {result['best_at_first']} of {trials}. In this study the stricter "
            f"rules lose at most {max(stricter) - mild:.4f} nats per token relative to the rule of `parnas tune`.",
        ]
    )


if __name__ == "__main__":
    write_text(PAGE, render())
