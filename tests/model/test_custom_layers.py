"""Letters of one's own: the page's examples, registering, and PARNAS_LAYERS."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.command_helpers import refusal, run_command
from helpers.model_helpers import make_network, make_supernet, model_config, random_ids, randomise, reach
from torch.nn import functional as F

from parnas.architecture import LETTERS, Architecture
from parnas.config.loader import dump_config
from parnas.errors import ParnasError
from parnas.evaluation.comparison import compare
from parnas.evaluation.loading import EvalOptions
from parnas.model.attention import encode_distances
from parnas.model.blocks import Block
from parnas.model.custom_layers import import_own_layers
from parnas.model.layers import MAKERS, Context, FeedForward, SelfAttention, make_layer, register_layer
from parnas.model.transformer_xl import INITIAL_STD, TransformerXL
from parnas.nas.cost import count_costs
from parnas.runs.run import PI, Run
from parnas.training.loaded_run import load
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layers.md"


@pytest.fixture(autouse=True)
def _letters_go_again(monkeypatch):
    """What a test registers ends with it."""
    known, makers = dict(LETTERS), dict(MAKERS)
    yield
    for registry, before in ((LETTERS, known), (MAKERS, makers)):
        registry.clear()
        registry.update(before)


@pytest.fixture
def page_file(tmp_path):
    """The examples of the page as a file of the user's."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    path = tmp_path / "my_layers.py"
    path.write_text("\n\n".join(blocks), encoding="utf-8")
    return path


@pytest.fixture
def registered(page_file):
    import_own_layers(str(page_file))


def context(tgt_len, d_model=8):
    return Context(encode_distances(tgt_len, d_model, torch.device("cpu")), None, None)


def through(layer, x):
    """What post-norm layers do around `transform`, with a slow transform in its place."""

    def apply(slow):
        parts = torch.stack([torch.stack([slow(token) for token in row]) for row in x])
        return layer.layer_norm(x + parts)

    return apply


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_geglu_equals_loops(registered):
    layer, x = randomise(make_layer("e:d_inner=5", model_config()).double()), random(2, 3, 8)

    def slow(token):
        gates = [float(row @ token) for row in layer.gate.weight]
        values = [float(row @ token) for row in layer.value.weight]
        inner = [g * (1 + math.erf(g / math.sqrt(2))) / 2 * v for g, v in zip(gates, values, strict=True)]
        return layer.outer.weight @ torch.tensor(inner, dtype=torch.float64)

    torch.testing.assert_close(layer(x, None, context(3)).hidden, through(layer, x)(slow), atol=1e-6, rtol=0)
    assert layer.multiply_adds(3, reach(3)) == 3 * 8 * 5
    assert make_layer("e", model_config(d_inner=12)).gate.out_features == 8


@pytest.mark.parametrize("experts", [2, 3, 6])
def test_mixture_of_experts_equals_a_loop_over_tokens(registered, experts):
    layer, x = randomise(make_layer(f"m:experts={experts}", model_config()).double()), random(4, 5, 8)
    used = set()

    def slow(token):
        scores = layer.router(token)
        best = sorted(range(experts), key=lambda index: -float(scores[index]))[:2]
        used.update(best)
        total = sum(float(scores[index].exp()) for index in best)
        return sum(layer.experts[index](token) * float(scores[index].exp()) / total for index in best)

    torch.testing.assert_close(layer(x, None, context(5)).hidden, through(layer, x)(slow), atol=1e-9, rtol=0)
    assert len(used) == experts
    assert layer.multiply_adds(5, reach(0)) == 8 * experts + 2 * 2 * 8 * 12


@pytest.mark.parametrize("name", ["e", "m"])
def test_gradients_flow_to_input_and_weights(registered, name):
    layer = randomise(make_layer(name, model_config(d_inner=6)).double())
    x = random(4, 4, 8).requires_grad_()
    layer(x, None, context(4)).hidden.square().sum().backward()
    assert (x.grad.abs() > 0).all()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())


def test_gradients_are_right(registered):
    for name in ("e", "m:experts=2"):
        layer = randomise(make_layer(name, model_config(d_inner=3)).double())
        assert torch.autograd.gradcheck(
            lambda x, layer=layer: layer(x, None, context(2)).hidden, random(1, 2, 8).requires_grad_()
        )


def test_they_run_under_autocast(registered):
    for name in ("e", "m"):
        network = make_network(f"s{name}").train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nll, _ = network.nll(random_ids(2, 4), random_ids(2, 4))
        nll.mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in network.blocks.parameters())


def test_one_expert_is_refused(registered):
    with pytest.raises(ParnasError, match="m:experts=2"):
        make_layer("m:experts=1", model_config())


def test_a_supernet_has_them_among_its_candidates(registered):
    network, ids = make_supernet(2, ("s", "e", "m", "m:experts=2")), random_ids(2, 5)
    gates = F.one_hot(torch.tensor([3, 1]), 4).float()
    extracted = network.extract(Architecture(["m:experts=2", "e"]))
    torch.testing.assert_close(extracted(ids).hidden, network(ids, gates=gates).hidden)


def test_initialisation_leaves_parameters_of_one_dimension_but_biases(registered):
    class Scaled(SelfAttention):
        def __init__(self, config):
            super().__init__(config)
            self.scale = torch.nn.Parameter(torch.full((config.d_model,), 3.0))
            self.menu = torch.nn.Parameter(torch.zeros(4, 4))  # a matrix whose name ends as the bias u does
            self.shift = torch.nn.Linear(3, 3)

    register_layer("z", Scaled, "scaled attention")
    from parnas.model.transformer_xl import TransformerXL

    network = TransformerXL.build(model_config(), Architecture("zs"), 20)
    layer = network.blocks[0]
    assert (layer.scale == 3).all()
    assert layer.menu.abs().min() > 0
    assert (layer.shift.bias == 0).all()
    assert network.u is not None


# Registering


@pytest.mark.parametrize(
    "letter, options, message",
    [
        ("s", (), "'s' .* self-attention"),
        ("i", (), "'i' .* identity"),
        ("S", (), "'S'"),
        ("ab", (), "'ab'"),
        ("", (), "''"),
        ("é", (), "'é'"),
        ("b", ("a=b",), "'a=b'"),
        ("b", ("Heads",), "'Heads'"),
    ],
)
def test_what_cannot_be_registered(letter, options, message):
    before = dict(LETTERS)
    with pytest.raises(ParnasError, match=message):
        register_layer(letter, SelfAttention, "mine", options)
    assert before == LETTERS


def test_a_letter_is_registered_once():
    register_layer("b", SelfAttention, "mine")
    with pytest.raises(ParnasError, match=r"'b' .* mine"):
        register_layer("b", SelfAttention, "mine")


def test_what_makes_no_block_is_refused():
    register_layer("b", lambda config: torch.nn.Linear(1, 1), "mine")
    with pytest.raises(ParnasError, match="a Linear; "):
        make_layer("b", model_config())


def test_random_architectures_stay_what_they_were(registered):
    assert set(Architecture.parse("random-300-1")) == {"s", "f", "i"}


def test_options_are_checked_and_given_to_the_maker():
    given = []
    register_layer("b", lambda config, **options: given.append(options) or SelfAttention(config), "mine", ["x", "y_2"])
    for name in ("b", "b:y_2=3,x=07"):
        make_layer(name, model_config())
    assert given == [{}, {"x": 7, "y_2": 3}]
    assert str(Architecture(["b:y_2=3,x=07"])) == "b:x=7,y_2=3"
    with pytest.raises(ParnasError, match=r"'z'.* x, y_2"):
        make_layer("b:z=1", model_config())


# PARNAS_LAYERS


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.py", None, "which is not a file"),
        ("no_such_module_of_mine", None, "not installed"),
        ("broken.py", "1 / 0", "fails: ZeroDivisionError: division by zero"),
        ("syntax.py", "def", "fails: SyntaxError"),
        ("imports.py", "import no_such_module_of_mine", "fails: ModuleNotFoundError"),
        ("taken.py", "from parnas.model.layers import *\nregister_layer('s', FeedForward, 'f')", "'s' is taken"),
    ],
)
def test_what_cannot_be_imported_is_told(name, content, message, tmp_path, monkeypatch, capsys):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("PARNAS_LAYERS", str(path) if name.endswith(".py") else name)
    error = refusal(capsys, "cutoffs", "nowhere")
    assert name in error
    assert message in error
    assert str(path) not in sys.modules


def test_several_are_imported_once(tmp_path, monkeypatch):
    for number, letter in enumerate("bd"):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = f"from parnas.model.layers import *\nregister_layer('{letter}', FeedForward, 'mine')\n"
        (folder / "own.py").write_text(text)
    (tmp_path / "own_layers_as_module.py").write_text(text.replace("'d'", "'e'"))
    monkeypatch.syspath_prepend(tmp_path)
    listed = f"{tmp_path}/0/own.py, {tmp_path}/1/own.py,own_layers_as_module,"
    for _ in range(2):
        import_own_layers(listed)
    assert {"b", "d", "e"} <= set(LETTERS)


def test_help_works_where_the_file_of_layers_is_missing(monkeypatch):
    monkeypatch.setenv("PARNAS_LAYERS", "missing.py")
    assert run_command("--help") == 0


@pytest.mark.parametrize("name", ["s", "s:heads=1", "f", "f:d_inner=5", "c", "i"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_counted_multiply_adds_equal_the_closed_forms(name, device):
    """Torch counts two operations for a multiply-add; segments of 6 and full memory."""
    with torch.device(device):
        layer = make_layer(name, model_config(memory={"ratio": 3}))
    for lengths in (reach(7), reach(6, 4)):
        assert Block.multiply_adds(layer, 6, lengths) == pytest.approx(layer.multiply_adds(6, lengths))


def test_a_layer_without_a_closed_form_is_counted(corpus, tmp_path):
    class Uncounted(FeedForward):
        multiply_adds = Block.multiply_adds

    register_layer("u", Uncounted, "uncounted")
    config = small_config(corpus, train__steps=2)
    runs = [retrain(config.replace(model__arch=arch), tmp_path / arch, Silent()).folder for arch in ("su", "sf")]
    counts = compare(runs, EvalOptions(), Silent()).table["multiply_adds_per_token"]
    assert counts[0] == counts[1]
    costs = count_costs(config.replace(search__space=("s", "u", "f")), "macs").per_layer
    assert costs["u"] == costs["f"]


def test_the_whole_journey_with_letters_of_ones_own(corpus, page_file, tmp_path, monkeypatch, capsys):
    config, found, trained = tmp_path / "config.yaml", tmp_path / "search", tmp_path / "retrain"
    settings = small_config(corpus, search__steps=8, search__alpha_start_step=2, train__steps=8, train__log_every=4)
    config.write_text(dump_config(settings))
    space = "search.space=[[s, 's:heads=1', e, m], [s, f, i, e, m], [e]]"
    assert "docs/layers.md" in refusal(capsys, "search", config, space, "--run", found)
    monkeypatch.setenv("PARNAS_LAYERS", str(page_file))
    assert run_command("search", config, space, "--run", found) == 0
    candidates = ["s", "s:heads=1", "e", "m", "f", "i"]
    for record in Run(found).pi_records():
        pi = torch.tensor(record.pi)
        assert pi.shape == (3, 6)
        assert [candidates[i] for i in pi[0].nonzero()[:, 0]] == ["s", "s:heads=1", "e", "m"]
        assert pi[2].tolist() == [0, 0, 1, 0, 0, 0]
    Run(found).append(
        PI, {"step": 25, "tau": 0.1, "pi": [[0, 0.6, 0.4, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]]}
    )
    assert run_command("derive", found, "--rerank-top-k", 0) == 0  # by this pi alone
    assert Run(found).derivation().arch == "s:heads=1 m e"
    out = capsys.readouterr().out
    assert "architecture: s:heads=1 m e" in out
    assert "1 self-attention heads=1" in out
    retrain(settings.replace(model__arch="s:heads=1 m e"), trained, Silent())
    assert Run(trained).summary().arch == "s:heads=1 m e"
    losses = [line.loss for line in Run(trained).metrics() if line.split == "train"]
    assert losses[-1] < losses[0]
    assert list(compare([found, trained], EvalOptions(), Silent()).table["arch"]) == ["s:heads=1 m e"] * 2
    assert load(trained).generate("the", 3)
    with monkeypatch.context() as patch:
        patch.delitem(LETTERS, "m")  # as in a process that did not import the file
        with pytest.raises(ParnasError, match=r"'m'.*PARNAS_LAYERS"):
            load(trained)


def test_matrices_of_own_layers_start_random_whatever_their_names():
    class Experts(Block):
        def __init__(self, config):
            super().__init__()
            self.shared, self.bias = (torch.nn.Parameter(torch.empty(40, config.d_model)) for _ in range(2))

    register_layer("x", Experts, "experts")
    torch.manual_seed(0)
    block = TransformerXL.build(model_config(), Architecture.parse("x"), 20).blocks[0]
    for matrix in (block.shared, block.bias):
        assert float(matrix.detach().std()) == pytest.approx(INITIAL_STD, rel=0.2)
