"""What heads attend to in a text, and the loss of networks whose pi is set by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_config
from PIL import Image

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.evaluation.attention import COMPRESSED, attention_maps
from parnas.evaluation.layer_swaps import LayerSwaps
from parnas.figures.attention_maps import AttentionMap, draw_attention_maps
from parnas.nas.rerank import shared_weight_losses
from parnas.runs.run import Run
from parnas.training.loaded_run import load
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

TEXT, BEFORE = "the old lobster finds the engine", "a small boat forgets nothing at all . \n no reader mends"


def test_maps_name_what_is_seen_and_each_query_spends_all_of_its_attention(retrain_run: Run) -> None:
    loaded = load(retrain_run.folder)
    maps = attention_maps(loaded, TEXT, BEFORE)
    assert [(each.block, each.layer) for each in maps] == [(1, "s"), (3, "s")]
    for each in maps:
        assert [query.strip() for query in each.queries] == TEXT.split()
        assert [key.strip() for key in each.keys[8:]] == TEXT.split()
        assert [key.strip() for key in each.keys[:8]] == ["nothing", "at", "all", ".", "", "no", "reader", "mends"]
        assert each.weights.shape == (2, 6, 14)  # mem_len is 8
        np.testing.assert_allclose(each.weights.sum(axis=-1), 1, rtol=1e-5)
        assert not np.triu(each.weights[:, :, 9:], 0)[0].any()


def test_the_last_query_sees_what_a_network_that_reads_token_by_token_sees(retrain_run: Run) -> None:
    loaded = load(retrain_run.folder)
    (first, _) = attention_maps(loaded, TEXT)
    ids, memory = loaded.tokenizer.encode(TEXT), None
    with torch.no_grad():
        for token in ids:
            output = loaded.model(torch.tensor([[token]]), memory, with_weights=True)
            memory = output.memory
    weights = output.weights[0]
    assert weights is not None
    np.testing.assert_allclose(first.weights[:, -1], weights[:, 0, 0].numpy(), atol=1e-5)


def test_maps_of_a_search_are_those_of_its_derived_network(search_run: Run) -> None:
    loaded = load(search_run.folder)
    blocks = [number for number, name in enumerate(loaded.architecture, 1) if name == "s"]
    if blocks:
        assert [each.block for each in attention_maps(loaded, TEXT)] == blocks
    else:
        with pytest.raises(ParnasError):
            attention_maps(loaded, TEXT)


def test_compressed_positions_have_no_name_of_their_own(corpus: Path, tmp_path: Path) -> None:
    memory = {"model__memory__cmem_len": 4, "model__memory__ratio": 2, "model__mem_len": 4}
    config = small_config(corpus, train__steps=2, **memory)
    loaded = load(retrain(config.replace(model__arch="i c s:heads=1"), tmp_path / "run", Silent()).folder)
    compressive, plain = attention_maps(loaded, TEXT, BEFORE)
    assert (compressive.block, plain.block) == (2, 3)
    assert compressive.keys[:4] == (COMPRESSED,) * 4
    assert [key.strip() for key in plain.keys[:4]] == [key.strip() for key in compressive.keys[-10:-6]]
    picture = draw_attention_maps([compressive, plain], tmp_path / "maps.png")
    assert min(Image.open(picture).size) > 200


def random_maps(layers: int, heads: int, queries: int, keys: int) -> list[AttentionMap]:
    head = np.random.default_rng(0).dirichlet([0.05] * keys, queries).astype(np.float32)
    weights = np.broadcast_to(head, (heads, queries, keys))
    names = tuple(f"token{number}" for number in range(keys))
    return [AttentionMap(block, "s", weights, names[-queries:], names) for block in range(1, layers + 1)]


def test_a_picture_is_no_larger_than_can_be_looked_at(tmp_path: Path) -> None:
    long = Image.open(draw_attention_maps(random_maps(1, 2, 512, 640), tmp_path / "long.png")).size
    assert max(long) < 1500  # two maps of four inches side by side, and margins
    whole = Image.open(draw_attention_maps(random_maps(1, 2, 6, 64), tmp_path / "whole.png")).size
    assert whole[0] > 2400  # names of 64 tokens below each
    for layers, heads in ((1, 60), (60, 1), (32, 16)):
        with pytest.raises(ParnasError, match=f"{layers} layers of up to {heads} heads"):
            draw_attention_maps(random_maps(layers, heads, 512, 640), tmp_path / "huge.png")
    assert not (tmp_path / "huge.png").exists()


def test_texts_that_cannot_be_shown_are_refused(retrain_run: Run, corpus: Path, tmp_path: Path) -> None:
    loaded = load(retrain_run.folder)
    for text in ("", "boat " * 600):
        with pytest.raises(ParnasError, match="512"):
            attention_maps(loaded, text)
    with pytest.raises(ParnasError):
        draw_attention_maps([], tmp_path / "none.png")


def test_the_derived_pi_gives_the_loss_of_the_derived_network(search_run: Run) -> None:
    by_hand = LayerSwaps(search_run, tokens=400)
    config, supernet = by_hand.loaded.config, by_hand.supernet

    class Streams:
        class tokenizer:
            eos_id = by_hand.eos_id

    of = shared_weight_losses(supernet, config, Streams, by_hand.text)  # type: ignore[arg-type]
    architecture = by_hand.loaded.architecture
    assert by_hand.loss() == pytest.approx(of(architecture).per_token, abs=1e-5)
    others = Architecture(["s", *list(architecture)[1:]])
    assert by_hand.loss({1: {"s": 1.0}}) == pytest.approx(of(others).per_token, abs=1e-5)
    table = by_hand.swaps()
    assert len(table) == 9
    stays = [
        table.query("block == @block and layer == @layer")["more"].item() for block, layer in enumerate(architecture, 1)
    ]
    assert stays == pytest.approx([0, 0, 0], abs=1e-6)


def test_a_mixture_holds_for_one_call(search_run: Run) -> None:
    swaps = LayerSwaps(search_run, tokens=400)
    derived = swaps.loss()
    mixed = swaps.loss({2: {"s": 0.5, "f": 0.25, "i": 0.25}})
    pi = swaps.supernet.pi().tolist()
    assert pi[1] == pytest.approx([0.5, 0.25, 0.25])
    for block in (0, 2):
        assert dict(zip("sfi", pi[block], strict=True))[swaps.loaded.architecture.layers[block]] == 1
    assert swaps.loss() == derived != mixed


def test_a_wrong_pi_is_refused(search_run: Run, retrain_run: Run) -> None:
    by_hand = LayerSwaps(search_run, tokens=400)
    for pi, told in {
        "blocks are 1 to 3": {4: {"s": 1.0}},
        "candidates are s, f, i": {1: {"c": 1.0}},
        "add up to 1": {1: {"s": 0.5}},
        r"block 1 is \{\}; give probabilities": {1: {}},
        "block 2 is .*nan.*; give probabilities": {2: {"s": 1.0, "f": float("nan")}},
        "block 3 is .*; give probabilities": {3: {"s": 2.0, "f": -1.0}},
    }.items():
        with pytest.raises(ParnasError, match=pi):
            by_hand.loss(told)
    with pytest.raises(ParnasError):
        LayerSwaps(retrain_run)
