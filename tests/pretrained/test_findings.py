"""Findings of a probe: the networks that are chosen, the sentence, and the written files."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from helpers.model_helpers import make_network, random_ids
from PIL import Image

from parnas.pretrained.findings import (
    Finding,
    Findings,
    Times,
    investigate,
    list_numbers,
    measure_times,
    scores_to_pi,
    write_findings,
)
from parnas.pretrained.parent import ParnasParent
from parnas.pretrained.probe import Change, Probe, measure_networks
from parnas.training.device import Device

CPU = Device(torch.device("cpu"), "fp32")


@pytest.fixture(scope="module")
def parent():
    return ParnasParent(make_network("sfsks", n_heads=4, d_model=16, d_inner=16), "sfsks", 4)


@pytest.fixture(scope="module")
def findings(parent):
    return investigate(parent, random_ids(2, 25), CPU, 2, 2, 1, lambda _: None)


def kl(findings, names):
    """Return the sum of divergences of the replaced layers."""
    changes = zip(findings.probe.layers, names, findings.probe.changes, strict=True)
    return sum(each[name].kl for own, name, each in changes if name != own)


def test_of_all_networks_with_so_many_attention_layers_the_least_sum_of_divergences_is_taken(findings):
    for kept, found in zip((2, 1, 0), findings.attention, strict=True):
        choices = []
        for places in itertools.combinations((0, 2, 4), kept):
            choices.append(tuple("i" if name == "s" and n not in places else name for n, name in enumerate("sfsks")))
        assert found.layers == min(choices, key=lambda names: kl(findings, names))
        assert found.predicted_kl == pytest.approx(kl(findings, found.layers))


def test_the_front_is_the_best_choice_within_each_share_of_the_latency(parent, findings):
    spaces = [(own, *names) for own, names in zip(parent.layers, parent.alternatives, strict=True)]
    times = findings.times.layers
    whole = sum(times[name] for name in parent.layers)
    for found in findings.front:
        cost = sum(times[name] for name in found.layers)
        assert found.latency == pytest.approx(cost / whole)
        within = [names for names in itertools.product(*spaces) if sum(times[name] for name in names) <= cost + 1e-12]
        assert kl(findings, found.layers) <= min(kl(findings, names) for names in within) + 1e-6
        total = findings.times.fixed
        assert found.speed == pytest.approx((total + whole) / (total + cost))


def test_whole_networks_are_measured(parent, findings):
    for found in (*findings.attention, *findings.front):
        (change,) = measure_networks(parent, random_ids(2, 25), [found.layers])
        assert (found.rise, found.kl) == pytest.approx(tuple(change))


def make_findings(layers, *fewer, front=()):
    """Findings in which networks with fewer attention layers, and those of the front, have given rises of the loss."""
    times = Times(1.0, {"s": 2.0, "f": 1.0, "i": 0.0})
    probe = Probe(tuple(layers), 2.0, 100, tuple({"i": Change(0.1, 0.1)} for _ in layers), ())
    found = [Finding(tuple(names), 0.1, rise, 0.1, rise, 0.5, 1.6) for names, rise in fewer]
    cheaper = [Finding(tuple(names), 0.1, rise, 0.1, rise, 0.5, speed) for names, rise, speed in front]
    return Findings(probe, times, tuple(found), tuple(cheaper))


@pytest.mark.parametrize(
    ("fewer", "answer"),
    [
        (
            [("sfif", 0.01), ("ifif", 0.05)],
            "Layer 1 needs attention; without it in the other the model is 1.6 times as fast at 1.0% higher "
            "perplexity.",
        ),
        (
            [("sfif", 0.01), ("ifif", 0.0149)],
            "No layer needs attention; without it in all 2 the model is 1.6 times as fast at 1.5% higher perplexity.",
        ),
        (
            [("sfif", -0.02), ("ifif", 0.5)],
            "Layer 1 needs attention; without it in the other the model is 1.6 times as fast at 2.0% lower perplexity.",
        ),
        (
            [("sfif", 0.1), ("ifif", 0.2)],
            "All 2 attention layers are needed: without the least important one, perplexity is 10.5% higher.",
        ),
    ],
)
def test_the_answer_is_a_sentence(fewer, answer):
    assert make_findings("sfsf", *fewer).answer == answer


@pytest.mark.parametrize(
    ("fewer", "front", "sentence"),
    [
        ([0.1], [("sw", "f", "i", "fh")], "With 1 of its 4 layers left out and 2 cut down it is 1.9 times as fast"),
        ([0.1], [("sw", "f", "sw", "f")], "With 2 of its 4 layers cut down it is 1.9 times as fast"),
        ([0.01], [("i", "f", "i", "f")], "With 2 of its 4 layers left out it is 1.9 times as fast"),
    ],
)
def test_the_answer_says_how_fast_the_model_is_with_cheaper_layers(fewer, front, sentence):
    networks = [(names, 0.0149, 1.9) for names in front] + [("iiii", 0.1, 4.0), ("ffff", 0.001, 1.2)]
    findings = make_findings("sfsf", *(("sfif", rise) for rise in fewer), front=networks)
    assert findings.answer.endswith(f". {sentence} at 1.5% higher perplexity.")


@pytest.mark.parametrize("cheaper", [("sfii", 0.01, 1.63), ("sfii", 0.1, 3.0)])
def test_cheaper_layers_are_not_named_where_they_are_no_faster_or_worse(cheaper):
    plain, both = (make_findings("sfsf", ("sfif", 0.01), front=front) for front in ((), [cheaper]))
    assert both.answer == plain.answer


def test_a_model_without_attention_is_said_to_have_none():
    assert make_findings("ff").answer == "The model has no attention layer."


@pytest.mark.parametrize(("numbers", "text"), [([1], "1"), ([1, 4], "1 and 4"), ([1, 4, 9], "1, 4 and 9")])
def test_numbers_are_listed_as_in_a_sentence(numbers, text):
    assert list_numbers(numbers) == text


def test_files_hold_the_numbers_and_the_pictures(findings, tmp_path: Path):
    written = write_findings(findings, tmp_path / "probe")
    assert [path.name for path in written] == ["probe.json", "probe.png", "attention.png", "report.html"]
    content = json.loads(written[0].read_text())
    assert content["answer"] == findings.answer
    assert len(content["changes"]) == 5
    assert content["changes"][0]["i"]["kl"] == pytest.approx(findings.probe.changes[0]["i"].kl)
    assert content["pairs"][0]["both"].keys() == {"loss", "kl"}
    for path in written[1:3]:
        with Image.open(path) as picture:
            assert min(picture.size) > 200


def test_the_only_attention_layer_is_not_counted():
    answer = make_findings("sf", ("if", 0.01)).answer
    assert answer == "No layer needs attention; without it the model is 1.6 times as fast at 1.0% higher perplexity."
    answer = make_findings("sf", ("if", 0.1)).answer
    assert answer == "The attention layer is needed: without it, perplexity is 10.5% higher."


def test_a_model_of_attention_alone_keeps_a_layer():
    parent = ParnasParent(make_network("ss", n_heads=4, d_model=16), "ss", 4)
    found = investigate(parent, random_ids(2, 25), CPU, 0, 2, 1, lambda _: None)
    assert [each.layers.count("i") for each in found.attention] == [1]


def test_a_divergence_that_is_not_a_number_is_no_perfect_replacement():
    changes = ({"i": Change(math.nan, math.nan), "f:d_inner=8": Change(0.1, 0.1)},)
    (pi,) = scores_to_pi(Probe(("f",), 4.0, 100, changes, ()))
    assert pi["f"] > pi["f:d_inner=8"] > pi["i"] > 0


def test_the_time_outside_the_layers_is_that_of_the_softmax(parent, monkeypatch):
    """A model of `transformers` runs as a whole to embed a text, which must not count."""
    embedded = []
    embed = parent.embed
    monkeypatch.setattr(parent, "embed", lambda ids: embedded.append(1) or embed(ids))
    measure_times(parent, random_ids(2, 25), CPU, 3)
    assert len(embedded) == 1
