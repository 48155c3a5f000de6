"""Hand-written gradients against autograd's of the textbook forms."""

import plain
import pytest
import torch
from helpers.model_helpers import make_network, make_supernet, random_ids
from plain import plain_operations
from torch.nn import functional as F

from parnas.model import fused
from parnas.model.memory import list_tensors

HEADS = {
    "full": {},
    "adaptive, tied": {"cutoffs": (5, 9)},
    "adaptive, narrow": {"cutoffs": (5, 9), "proj_factor": 2, "tie_weights": False},
    "div_val": {"cutoffs": (5, 9), "div_val": 2},
    "subword features": {"cutoffs": (5, 9), "subword_features": 12},
    "pointer": {"cutoffs": (5, 9), "pointer_len": 7},
}
LAYERS = {"post-norm": {}, "pre-norm": {"norm": "pre"}, "own biases, d_head 3": {"share_biases": False, "d_head": 3}}


def train(network, segments, precision="fp32", gates=None):
    """Losses, gradients and memories of some segments with memory carried on."""
    memory, results = None, []
    for ids in segments:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            nll, memory = network.nll(ids, ids.flip(1), memory, gates)
        nll.mean().backward()
        results += [nll.detach(), *(kept.float() for kept in list_tensors(memory))]
    return results + [p.grad for p in network.parameters() if p.grad is not None]


LENGTHS = [(1, 0), (1, 4), (5, 0), (5, 3), (3, 7)]  # tgt_len, mem_len


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_losses_gradients_and_memories_are_those_of_the_textbook(head, lengths):
    """In bf16 no further from float32 than the textbook's own bf16 is, but for some rounding.

    The kinds of layers come in turn, so that every two of head, layers and lengths meet.
    """
    tgt_len, mem_len = lengths
    layers = list(LAYERS.values())[(list(HEADS).index(head) + LENGTHS.index(lengths)) % len(LAYERS)]
    settings = {"mem_len": mem_len, **HEADS[head], **layers}
    segments = random_ids(4, 3 * tgt_len).split(tgt_len, dim=1)
    found, found_bf16 = (train(make_network("sfs", **settings), segments, precision) for precision in ("fp32", "bf16"))
    with plain_operations():
        exact, bf16 = (train(make_network("sfs", **settings), segments, precision) for precision in ("fp32", "bf16"))
    assert len(found) == len(found_bf16) == len(exact)
    for one, rounded, expected, theirs in zip(found, found_bf16, exact, bf16, strict=True):
        assert one.shape == rounded.shape == expected.shape
        size = max(1.0, float(expected.norm()))
        assert float((one - expected).norm()) <= 1e-5 * size
        assert float((rounded - expected).norm()) <= 1.5 * float((theirs - expected).norm()) + 0.02 * size


def test_mixtures_have_the_gradients_of_the_textbook():
    segments, gates = random_ids(2, 12).split(4, dim=1), torch.rand(3, 3)
    found = train(make_supernet(cutoffs=(5, 9)), segments, gates=gates)
    with plain_operations():
        expected = train(make_supernet(cutoffs=(5, 9)), segments, gates=gates)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_attention_gradients_are_finite_differences():
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 2, 4), (2, 5, 2, 2, 4), (5, 2, 4), (2, 4), (2, 4)]
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *given: fused.relative_attention(*given, 0.0), inputs)


def test_attention_dropout_has_the_gradient_of_its_mask(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    kept = (torch.rand(4, 3, 5, generator=draw) > 0.4).double()
    monkeypatch.setattr(fused, "keep_mask", lambda like, p: kept.to(like.dtype))
    shapes = [(2, 3, 2, 4), (2, 5, 2, 2, 4), (5, 2, 4), (2, 4), (2, 4)]
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *given: fused.relative_attention(*given, 0.4), inputs)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.73])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_a_share_of_one_less_p_and_the_mean(p, dtype):
    torch.manual_seed(0)
    x = torch.ones(501, 401, dtype=dtype, requires_grad=True)
    dropped = fused.dropout(x, p)
    assert float((dropped != 0).float().mean()) == pytest.approx(1 - p, abs=0.005)
    assert dropped.detach().unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=0.005)
    for neighbours in (dropped[1:] * dropped[:-1], dropped[:, 1:] * dropped[:, :-1]):
        assert float((neighbours != 0).float().mean()) == pytest.approx((1 - p) ** 2, abs=0.01)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped.detach())


def test_two_masks_differ_and_the_seed_fixes_them():
    masks = []
    for _ in range(2):
        torch.manual_seed(3)
        masks += [fused.keep_mask(torch.ones(7, 9), 0.5) for _ in range(2)]
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


def test_an_evaluation_finds_no_gradient_of_the_softmax(monkeypatch):
    """Neither that matrix nor a copy of it."""
    called = []
    monkeypatch.setattr(torch.Tensor, "exp_", lambda x: called.append(x.shape) or x.copy_(x.exp()))
    hidden, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((4, 3), (5, 3), (5,)))
    with torch.no_grad():
        evaluated = fused.linear_cross_entropy(hidden, weight, bias, torch.arange(4))
    assert not called
    assert torch.equal(evaluated, fused.linear_cross_entropy(hidden, weight, bias, torch.arange(4)))
    assert called == [(4, 5)]


def test_a_target_without_probability_has_its_loss_all_the_same():
    """exp would underflow: the loss is taken from the logits."""
    hidden, weight = torch.tensor([[200.0]], requires_grad=True), torch.tensor([[1.0], [-1.0]])
    nll = fused.linear_cross_entropy(hidden, weight, torch.zeros(2), torch.tensor([1]))
    nll.sum().backward()
    expected = F.cross_entropy(torch.tensor([[200.0, -200.0]]), torch.tensor([1]))
    assert nll.item() == pytest.approx(expected.item()) == 400
    assert float(hidden.grad) == 2


def test_what_is_made_once_is_the_same_tensor_for_the_same_arguments():
    made = fused.cache_tensors(lambda size, device: torch.zeros(size, device=device))
    assert made(3, "cpu") is made(3, "cpu")
    assert made(4, "cpu").shape == (4,)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_blocks_that_overlap_are_those_of_unfold_and_so_is_their_gradient(blocks):
    x = torch.randn(2, 3 * (blocks + 1), 4, dtype=torch.float64, requires_grad=True)
    found, expected = fused.overlapping_blocks(x, 3), x.unfold(1, 6, 3).movedim(-1, 2)
    assert torch.equal(found, expected)
    weights = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_soft_targets_change_the_gradient_alone(temperature, smoothing):
    draw = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=draw).requires_grad_() for shape in ((4, 3), (5, 3), (5,))]
    targets, of_rows = torch.tensor([0, 4, 2, 2]), torch.rand(4, generator=draw)
    soft = fused.SoftTargets(torch.rand(4, 5, generator=draw).softmax(dim=-1), 0.3, temperature)
    results = []
    for function in (fused.linear_cross_entropy, plain.linear_cross_entropy):
        nll = function(*inputs, targets, smoothing, soft)
        results.append((nll.detach(), *torch.autograd.grad((of_rows * nll).sum(), inputs)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(results[0][0], fused.linear_cross_entropy(*inputs, targets).detach())
    hidden, *frozen = inputs  # the gradient of the hidden states is the same where weight and bias need none
    nll = fused.linear_cross_entropy(hidden, *(each.detach() for each in frozen), targets, smoothing, soft)
    assert torch.equal(torch.autograd.grad((of_rows * nll).sum(), hidden)[0], results[0][1])


@pytest.mark.parametrize("copied", [True, False])
def test_a_mixture_of_tiny_probabilities_has_finite_loss_and_gradients(copied):
    """Here the probability of the softmax, and without a copy that of the target, is zero in float32."""
    nll, sentinel = torch.tensor([[3.0]], requires_grad=True), torch.tensor([[-150.0]], requires_grad=True)
    scores, copies = torch.tensor([[[60.0, 40.0]]], requires_grad=True), torch.tensor([[[False, copied]]])
    found, expected = (
        (loss, *torch.autograd.grad(loss.sum(), [nll, sentinel, scores]))
        for loss in (operation(nll, sentinel, scores, copies) for operation in (fused.mix_copying, plain.mix_copying))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert found[0].isfinite().all()
