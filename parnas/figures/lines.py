"""pi over time as lines, one small picture per block."""

from pathlib import Path

from matplotlib.ticker import FixedLocator, MaxNLocator, StrMethodFormatter

from parnas.figures.colours import candidate_colours
from parnas.figures.history import PiHistory
from parnas.figures.style import (
    INK,
    LABEL_SIZE,
    SMALL_SIZE,
    candidate_handles,
    new_figure,
    save_png,
    shorten,
    tidy,
)

MOST_COLUMNS = 8
# Inches; each panel's size includes the room for its title and labels.
PANEL_WIDTH, PANEL_HEIGHT = 1.45, 1.3
LEFT, RIGHT, TOP, BOTTOM = 0.6, 0.2, 0.55, 0.45
LEGEND_ROW = 0.19  # further rows of the legend
CHARACTER, HANDLE = 0.08, 0.55  # about the width of a character in the legend, and of a line with its margins
LONGEST_TITLE = 22  # characters over a panel


def draw_pi_lines(history: PiHistory, path: Path) -> Path:
    """Write pi of every candidate over the steps, one panel per block titled with its likeliest candidate."""
    rows, columns = _grid(history.blocks)
    width = LEFT + PANEL_WIDTH * columns + RIGHT
    handles, colours = candidate_handles(history.space), candidate_colours(history.space)
    entry = HANDLE + CHARACTER * max(len(str(handle.get_label())) for handle in handles)
    legend_columns = min(len(handles), max(1, int(width / entry)))
    top = TOP + LEGEND_ROW * (-(-len(handles) // legend_columns) - 1)
    height = top + PANEL_HEIGHT * rows + BOTTOM
    figure = new_figure(width, height)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    figure.subplots_adjust(LEFT / width, BOTTOM / height, 1 - RIGHT / width, 1 - top / height, 0.18, 0.4)

    single = len(history) == 1
    marker = "o" if single else ""  # a line would not show a single step
    for block, (axes, derived) in enumerate(zip(grid, history.derived[-1], strict=False)):
        tidy(axes)
        for candidate, name in enumerate(history.space):
            values = history.pi[:, block, candidate]
            axes.plot(history.steps, values, color=colours[name], linewidth=1.3, marker=marker, markersize=4)
        title = shorten(f"block {block + 1}: {derived}", LONGEST_TITLE)
        axes.set_title(title, fontsize=SMALL_SIZE, color=colours[derived], pad=3)
    grid[0].set_ylim(-0.03, 1.03)
    grid[0].set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    grid[0].xaxis.set_major_locator(FixedLocator(history.steps.tolist()) if single else MaxNLocator(2, integer=True))
    grid[0].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for axes in grid[history.blocks :]:
        axes.remove()

    figure.supxlabel("step", fontsize=LABEL_SIZE, color=INK, y=0.08 / height, va="bottom")
    figure.supylabel("pi", fontsize=LABEL_SIZE, color=INK, x=0.08 / width, ha="left")
    figure.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.05 / height),
        ncols=legend_columns,
        frameon=False,
        fontsize=LABEL_SIZE,
        labelcolor=INK,
    )
    return save_png(figure, path)


def _grid(blocks: int) -> tuple[int, int]:
    """Rows and columns that leave few panels empty."""
    rows = -(-blocks // MOST_COLUMNS)
    return rows, -(-blocks // rows)
