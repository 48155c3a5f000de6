"""Figures of runs: content, number of frames, and refused input."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from parnas.architecture import LETTERS
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.figures import curves, style
from parnas.figures.colours import LETTER_COLOURS, candidate_colours
from parnas.figures.curves import Curves, curve_notes, draw_learning_curves
from parnas.figures.draw import draw_run
from parnas.figures.heatmap import (
    LAST_FRAME_MS,
    AnimationOptions,
    Heatmap,
    draw_pi_animation,
    draw_pi_frames,
)
from parnas.figures.panels import draw_pi_lines
from parnas.figures.style import thin
from parnas.runs.pi_history import PiHistory
from parnas.runs.records import InheritedWeights, PiRecord
from parnas.runs.run import METRICS, PI, Run


def pi_records(lines, blocks, candidates, seed=0):
    pi = np.random.default_rng(seed).dirichlet(np.ones(candidates), (lines, blocks)).tolist()
    return [{"step": 10 * (n + 1), "tau": 1 / (n + 1), "pi": pi[n]} for n in range(lines)]


def history(lines=5, blocks=4, space=("s", "f", "i")):
    return make_history(pi_records(lines, blocks, len(space)), space)


def make_history(lines, space):
    return PiHistory.from_records([PiRecord(**line) for line in lines], space)


def make_run(folder, kind, records, **config):
    run = Run(folder)
    run.create(kind, Config().replace(**config), {})
    for name, lines in records.items():
        (run.folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def metrics(steps=3, **valid):
    train = [{"step": 10 * n, "split": "train", "loss": 1.0, "ppl": 100.0 / n} for n in range(1, steps + 1)]
    return [*train, {"step": 10 * steps, "split": "valid", "loss": 1.0, "ppl": 50.0, **valid}]


@pytest.fixture
def search_run(tmp_path):
    records = {PI: pi_records(7, 6, 3), METRICS: metrics(argmax_ppl=60.0)}
    return make_run(tmp_path / "search", "search", records, search__blocks=6)


@pytest.fixture
def legend(monkeypatch):
    """The entries of the legend and then the notes, as they are when the picture is saved."""
    texts = []

    def record(figure, path):
        below = figure.legends[0]
        texts.extend(text.get_text() for text in [*below.get_texts(), below.get_title()])
        return style.save_png(figure, path)

    monkeypatch.setattr(curves, "save_png", record)
    return texts


class TestThinning:
    @pytest.mark.parametrize("count, most", [(1, 200), (2, 2), (200, 200), (201, 200), (5000, 200), (399, 2)])
    def test_keeps_the_ends_and_the_order(self, count, most):
        indices = thin(count, most)
        assert len(indices) == min(count, most)
        assert indices[0] == 0
        assert indices[-1] == count - 1
        assert indices == sorted(set(indices))

    def test_is_even(self):
        assert set(np.diff(thin(1000, 200))) <= {5, 6}


class TestAnimation:
    def test_one_frame_per_logged_step_and_the_last_held(self, tmp_path):
        path = draw_pi_animation(history(7), tmp_path / "pi.gif", AnimationOptions(frame_ms=120))
        with Image.open(path) as gif:
            times = []
            for frame in range(gif.n_frames):
                gif.seek(frame)
                times.append(gif.info["duration"])
            assert gif.info["loop"] == 0
        assert times == [120] * 6 + [LAST_FRAME_MS]

    def test_thinned_frames_end_with_the_last_step(self, tmp_path):
        shown = history(15)
        path = draw_pi_animation(shown, tmp_path / "pi.gif", AnimationOptions(max_frames=5))
        heatmap = Heatmap(shown)
        pictures = np.array([np.asarray(heatmap.picture(index)) for index in range(15)], dtype=np.int16)
        with Image.open(path) as gif:
            assert gif.n_frames == 5
            for frame, index in ((0, 0), (4, 14)):
                gif.seek(frame)
                differences = np.abs(pictures - np.asarray(gif.convert("RGB"))).mean(axis=(1, 2, 3))
                assert differences.argmin() == index
                assert differences[index] < 0.5  # what 256 colours cost

    @pytest.mark.parametrize("width", [300, 1111])
    def test_width_option_scales_the_picture(self, tmp_path, width):
        path = draw_pi_animation(history(2), tmp_path / "pi.gif", AnimationOptions(width_px=width))
        natural = Heatmap(history(2)).picture(0)
        with Image.open(path) as gif:
            assert gif.width == pytest.approx(width, abs=1)
            assert gif.width / gif.height == pytest.approx(natural.width / natural.height, rel=0.02)

    @pytest.mark.parametrize("blocks, space", [(4, "sf"), (6, "sfi"), (32, "sfi"), (130, "sfi")])
    def test_picture_grows_with_the_blocks_but_stays_readable(self, blocks, space):
        picture = Heatmap(history(1, blocks, tuple(space))).picture(0)
        assert 500 <= picture.width <= 1300
        assert 200 <= picture.height <= 260

    @pytest.mark.parametrize("options", [{"frame_ms": 5}, {"width_px": 10}, {"max_frames": 1}])
    def test_refuses_options_that_a_gif_cannot_hold(self, options):
        with pytest.raises(ParnasError, match=str(*options.values())):
            AnimationOptions(**options)

    def test_a_failed_drawing_leaves_the_old_file(self, tmp_path, monkeypatch):
        (tmp_path / "pi.gif").write_bytes(b"old")
        whole = Heatmap.picture

        def fail_later(heatmap, index):
            if index == 2:
                raise OSError("disk full")
            return whole(heatmap, index)

        monkeypatch.setattr(Heatmap, "picture", fail_later)
        with pytest.raises(OSError, match="disk full"):
            draw_pi_animation(history(4), tmp_path / "pi.gif", AnimationOptions())
        assert [path.name for path in tmp_path.iterdir()] == ["pi.gif"]
        assert (tmp_path / "pi.gif").read_bytes() == b"old"


class TestHeatmap:
    RECORDS = (
        {"step": 1200, "tau": 0.5, "pi": [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]},
        {"step": 2400, "tau": 0.25, "pi": [[0.05, 0.05, 0.9], [0.4, 0.35, 0.25]]},
    )

    def test_title_names_step_tau_and_string(self):
        heatmap = Heatmap(make_history(self.RECORDS, ("s", "f", "i")))
        for index, step, tau, string in ((0, "1,200", "0.500", "sf"), (1, "2,400", "0.250", "is")):
            heatmap.picture(index)
            assert heatmap.title.get_text().split() == ["step", step, "tau", tau]
            assert heatmap.string.get_text() == string

    def test_most_probable_candidate_of_each_block_carries_its_value(self):
        heatmap = Heatmap(make_history(self.RECORDS, ("s", "f", "i")))
        heatmap.picture(1)
        assert [(text.get_position(), text.get_text()) for text in heatmap.values] == [
            ((0.5, 2.5), "0.90"),
            ((1.5, 0.5), "0.40"),
        ]

    def test_the_layers_of_the_derived_architecture_are_framed(self):
        records = [{**record, "arch": arch} for record, arch in zip(self.RECORDS, ("sf", "fi"), strict=True)]
        heatmap = Heatmap(make_history(records, ("s", "f", "i")))
        pictures = []
        for index, rows in ((0, [0, 1]), (1, [1, 2])):
            pictures.append(np.asarray(heatmap.picture(index).convert("L")))
            assert [frame.get_xy() for frame in heatmap.frames] == list(enumerate(rows))
        x, y = heatmap.axes.transData.transform((0.5, 1.0))  # between the first two candidates of block 1
        edge = pictures[1][int(len(pictures[1]) - y) - 2 : int(len(pictures[1]) - y) + 3, int(x)]
        assert edge.min() < 80, "the frame is drawn"

    def test_more_probable_is_darker(self):
        heatmap = Heatmap(make_history(self.RECORDS, ("s", "f", "i")))
        pixels = np.asarray(heatmap.picture(0).convert("L"))
        corners = heatmap.axes.transData.transform([(0.1, candidate + 0.15) for candidate in range(3)])
        shades = [pixels[int(len(pixels) - y), int(x)] for x, y in corners]
        assert shades == sorted(shades)
        assert len(set(shades)) == 3

    def test_too_long_a_string_is_shortened_in_its_middle(self):
        shown = history(1, blocks=300)
        heatmap = Heatmap(shown)
        heatmap.picture(0)
        assert "…" in heatmap.string.get_text()
        assert heatmap.string.get_text()[0] == shown.string(0)[0]
        assert heatmap.values == []

    def test_frames_are_first_middle_and_last(self, tmp_path):
        paths = draw_pi_frames(history(5), tmp_path)
        assert [path.name for path in paths] == ["pi-first.png", "pi-middle.png", "pi-last.png"]
        heatmap = Heatmap(history(5), dpi=style.PNG_DPI)
        for path, index in zip(paths, (0, 2, 4), strict=True):
            with Image.open(path) as picture:
                assert np.array_equal(np.asarray(picture), np.asarray(heatmap.picture(index)))

    def test_lines_need_no_more_than_one_step(self, tmp_path):
        for blocks, lines in ((1, 1), (11, 3)):
            with Image.open(draw_pi_lines(history(lines, blocks), tmp_path / "lines.png")) as picture:
                assert min(picture.size) > 200


class TestHistory:
    def test_string_is_the_argmax_of_each_block(self):
        records = [{"step": 1, "tau": 1, "pi": [[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]}]
        assert make_history(records, ("f", "i")).string(-1) == "iff"

    @pytest.mark.parametrize(
        "records, message",
        [
            ([], "no line yet"),
            ([*pi_records(1, 2, 3), *pi_records(1, 3, 3)], "pi differs in shape"),
            (pi_records(2, 4, 2), "correct search.space"),
            ([{"step": 1, "tau": 1, "pi": []}], "correct search.space"),
        ],
    )
    def test_refuses_records_that_do_not_fit(self, records, message):
        with pytest.raises(ParnasError, match=message):
            make_history(records, ("s", "f", "i"))


class TestCurves:
    def test_legend_lists_name_and_string_best_first(self, tmp_path, search_run, legend):
        worse = make_run(tmp_path / "$worse_", "retrain", {METRICS: metrics(ppl=70.0)}, model__arch="(sf)*3")
        draw_learning_curves([worse, search_run], tmp_path / "curves.png")
        assert legend[0].split()[:3] == ["50.00", "search", "SuperNet,"]
        assert legend[1].split() == ["70.00", "$worse_", "sfsfsf"]
        assert "derived network" in legend[2]
        assert "not comparable" not in legend[2]

    def test_a_derived_network_that_is_validated_itself_gets_no_line_of_its_own(self, tmp_path, legend):
        lines = {PI: pi_records(7, 6, 3), METRICS: metrics(argmax_ppl=50.0)}
        same = make_run(tmp_path / "search", "search", lines, search__blocks=6)
        draw_learning_curves([same], tmp_path / "curves.png")
        assert "Dotted" not in legend[1], "it would lie below the other line, where none can see it"

    def test_legend_of_a_search_has_its_derived_string(self, search_run, tmp_path, legend):
        (search_run.folder / "arch.yaml").write_text("arch: sfsffi\n")
        draw_learning_curves([search_run], tmp_path / "curves.png")
        assert legend[0].split() == ["50.00", "search", "sfsffi"]

    def test_says_when_perplexities_do_not_compare(self, search_run, tmp_path, legend):
        other = make_run(tmp_path / "other", "retrain", {METRICS: metrics()}, data__corpus="text8", model__arch="s")
        draw_learning_curves([search_run, other], tmp_path / "curves.png")
        assert "not comparable" in legend[-1]

    def test_runs_of_one_name_show_their_folders(self, tmp_path, legend):
        runs = [make_run(tmp_path / x / "run", "retrain", {METRICS: metrics()}, model__arch="sf") for x in "ab"]
        draw_learning_curves(runs, tmp_path / "curves.png")
        assert legend[0] != legend[1]

    def test_points_leave_out_what_no_log_axis_shows(self, tmp_path):
        lines = [{"step": n, "split": "valid", "ppl": ppl} for n, ppl in enumerate([float("inf"), None, 9.5])]
        run = make_run(tmp_path / "run", "retrain", {METRICS: lines}, model__arch="sf")
        assert Curves.from_run(run, "run").valid == [(2, 9.5)]

    def test_curves_of_inherited_weights_begin_after_the_search(self, tmp_path):
        run = make_run(tmp_path / "run", "retrain", {METRICS: metrics()}, model__arch="sf")
        scratch = Curves.from_run(run, "run")
        run.write_inherited(InheritedWeights(run="search", steps=100, seconds=1.0, sha256="0" * 64))
        later = Curves.from_run(run, "run")
        assert later.valid == [(step + 100, ppl) for step, ppl in scratch.valid]
        assert any("inherited weights begin" in note for note in curve_notes([later]))
        assert not any("inherited weights begin" in note for note in curve_notes([scratch]))

    def test_the_picture_grows_with_the_legend(self, tmp_path):
        runs = [make_run(tmp_path / f"{n}", "retrain", {METRICS: metrics()}, model__arch="sf") for n in range(12)]
        heights = []
        for count in (1, 12):
            with Image.open(draw_learning_curves(runs[:count], tmp_path / "curves.png")) as picture:
                heights.append(picture.height)
        assert heights[1] - heights[0] > 200

    def test_refuses_no_run_and_a_run_without_lines(self, tmp_path):
        with pytest.raises(ParnasError):
            draw_learning_curves([], tmp_path / "curves.png")
        empty = make_run(tmp_path / "empty", "retrain", {METRICS: []}, model__arch="sf")
        with pytest.raises(ParnasError, match=r"train\.log_every"):
            draw_learning_curves([empty], tmp_path / "curves.png")


class TestDrawRun:
    def test_a_search_gets_every_picture(self, search_run):
        paths = draw_run(search_run)
        names = ["pi.gif", "pi-first.png", "pi-middle.png", "pi-last.png", "pi-lines.png", "curves.png"]
        assert paths == [search_run.figures / name for name in names]
        assert {path.name for path in search_run.figures.iterdir()} == set(names)
        for path in paths:
            with Image.open(path) as picture:
                picture.verify()

    def test_a_retraining_gets_its_curves(self, tmp_path):
        run = make_run(tmp_path / "retrain", "retrain", {METRICS: metrics()}, model__arch="sf")
        assert draw_run(run) == [run.figures / "curves.png"]

    def test_a_search_without_pi_is_refused_with_a_hint(self, tmp_path):
        run = make_run(tmp_path / "none", "search", {METRICS: metrics()})
        with pytest.raises(ParnasError):
            draw_run(run)
        (run.folder / PI).touch()
        with pytest.raises(ParnasError, match=r"train\.log_every"):
            draw_run(run)


def test_every_letter_has_a_colour_of_its_own():
    assert set(LETTER_COLOURS) == set(LETTERS)
    assert len(set(LETTER_COLOURS.values())) == len(LETTERS)


def test_pictures_and_the_page_need_neither_torch_nor_pyplot():
    modules = "parnas.figures.draw, parnas.figures.report.page"
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'matplotlib.pyplot'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_variants_are_shades_of_their_letter_and_all_colours_differ():
    space = ("s:heads=2", "s", "f", "i", "s:heads=3", "q", "z", "f:d_inner=3")
    colours = candidate_colours(space)
    assert tuple(colours) == space
    assert len(set(colours.values())) == len(space)
    assert all(colours[letter] == LETTER_COLOURS[letter] for letter in "fi")
    assert colours["s:heads=2"] == LETTER_COLOURS["s"]
    assert all(len(colour) == 7 for colour in colours.values())


@pytest.mark.parametrize("blocks", [1, 6])
def test_names_with_options_are_shown_whole(tmp_path, blocks):
    space = ("s", "s:heads=2,d_head=16", "f", "f:d_inner=512", "i")
    many = history(3, blocks, space)
    assert many.string(-1) == (" " if any(len(name) > 1 for name in many.derived[-1]) else "").join(many.derived[-1])
    heatmap = Heatmap(many)
    labels = heatmap.axes.get_yticklabels()
    assert [label.get_text() for label in labels][1] == "self-attention  s:heads=2,d_head=16"
    assert min(label.get_window_extent().x0 for label in labels) >= 0
    for path in (draw_pi_animation(many, tmp_path / "pi.gif"), draw_pi_lines(many, tmp_path / "lines.png")):
        with Image.open(path) as picture:
            picture.verify()
