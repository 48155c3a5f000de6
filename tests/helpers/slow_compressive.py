"""Algorithms 1 and 2 of Rae et al. 2020 (arXiv 1911.05507) as they are printed, vector by vector.

For networks of compressive attention and feed-forward layers, with the weights of a fast network, one row at a time.
"""

import math

import torch
from helpers.model_helpers import sinusoids
from torch.nn import functional as F

TRAINED = ["conv", "dilated_conv"]
POOLS = ["max_pool", "mean_pool", "most_used"]
KINDS = [(function, "attention") for function in POOLS] + [
    (function, loss) for function in TRAINED for loss in ("attention", "autoencode", "bptt")
]


def settings(function="conv", loss="attention", mem_len=4, ratio=2, cmem_len=3, distance="slots", **more):
    """Changes of a model's configuration that give it compressive memory."""
    memory = {"function": function, "loss": loss, "ratio": ratio, "cmem_len": cmem_len, "distance": distance}
    return {"mem_len": mem_len, "memory": memory, **more}


class SlowCompressive:
    """Reads segments [T] of one row; `memory` and `compressed` hold a list of vectors for each block."""

    def __init__(self, network, reach):
        self.network, self.reach, self.settings = network, reach, network.config.memory
        self.memory = [[] for _ in network.blocks]
        self.compressed = [[] for _ in network.blocks]
        self.waiting = [[] for _ in network.blocks]  # with bptt: what the step before pushed out

    def read(self, ids):
        """Return the hidden states [T, D] of a segment, and the sum of the auxiliary losses of all blocks."""
        h, losses = list(self.network.embedding(ids[None])[0]), []
        for number, block in enumerate(self.network.blocks):
            if hasattr(block, "compression"):
                h, loss = self.attend(number, block, h)
                losses += loss
            else:
                h = [block(x[None, None], None, None).hidden[0, 0] for x in h]
        if self.network.final_norm is not None:
            h = [self.network.final_norm(x) for x in h]
        return torch.stack(h), losses

    def attend(self, number, block, h):
        if self.waiting[number]:
            new = self.compress(block, self.waiting[number], None)
            self.compressed[number] = (self.compressed[number] + new)[-self.reach.cmem_len :]
            self.waiting[number] = []
        memory, compressed = self.memory[number], self.compressed[number]
        pre_norm = self.network.config.norm == "pre"
        normed = [block.layer_norm(x) if pre_norm else x for x in h]
        seen = [block.layer_norm(x) if pre_norm else x for x in compressed + memory] + normed
        results, weights = [], []
        for t, x in enumerate(normed):
            change, given = self.attend_from(block, x, t, seen, len(compressed), len(memory))
            results.append(h[t] + change if pre_norm else block.layer_norm(h[t] + change))
            weights.append(given)
        losses = self.update(number, block, h, normed, weights)
        self.compressed[number] = [x.detach() for x in self.compressed[number]]
        return results, losses

    def attend_from(self, block, x, t, seen, slots, remembered):
        """Return the attention output of the query at t, and the weight of each key, averaged over heads."""
        width, ratio = block.head_width, self.settings.ratio
        keys, values = (
            block.key_value.weight[: len(block.key_value.weight) // 2],
            block.key_value.weight[-len(block.key_value.weight) // 2 :],
        )
        u, v = (self.network.u, self.network.v) if block.u is None else (block.u, block.v)
        parts, received = [], torch.zeros(len(seen), dtype=x.dtype)
        for head in range(block.n_heads):
            rows = slice(head * width, (head + 1) * width)
            q, scores, allowed = block.query.weight[rows] @ x, [], []
            for k, other in enumerate(seen):
                distance = t + slots + remembered - k
                window = self.reach.mem_len + self.reach.cmem_len
                if self.settings.distance == "tokens":
                    window = self.reach.mem_len + ratio * self.reach.cmem_len
                    if k < slots:
                        youngest = t + remembered + 1 + ratio * (slots - 1 - k)  # of the tokens that it stands for
                        distance = sum(range(youngest, youngest + ratio)) / ratio
                if distance < 0 or (self.reach.same_length and distance >= window):
                    continue
                clamped = distance if self.reach.clamp_len is None else min(distance, self.reach.clamp_len)
                r = block.position.weight[rows] @ sinusoids(clamped, len(x)).to(x.dtype)
                scores.append(((q + u[head]) @ (keys[rows] @ other) + (q + v[head]) @ r) / math.sqrt(width))
                allowed.append(k)
            weights = torch.stack(scores).softmax(0)
            parts.append(sum(w * (values[rows] @ seen[k]) for w, k in zip(weights, allowed, strict=True)))
            shares = weights.detach() / sum(w for w, k in zip(weights.detach(), allowed, strict=True) if k >= slots)
            for share, k in zip(shares, allowed, strict=True):
                received[k] += share / block.n_heads
        return block.output.weight @ torch.cat(parts), received[slots:]

    def update(self, number, block, h, normed, weights):
        """Lines "old_mem" to "cm" of algorithm 1; what does not fill a group waits in memory."""
        ratio = self.settings.ratio
        written = self.memory[number] + [x.detach() for x in h]
        count = max(0, len(written) - self.reach.mem_len) // ratio * ratio
        old, self.memory[number] = written[:count], written[count:]
        if not old:
            return []
        if block.compression.loss == "bptt" and self.network.training:
            self.waiting[number] = old
            return []
        usage = [
            sum(given[place] for given in weights)
            / sum(place <= len(self.memory[number]) + count - len(h) + t for t in range(len(h)))
            for place in range(count)
        ]
        new = self.compress(block, old, usage)
        self.compressed[number] = (self.compressed[number] + [x.detach() for x in new])[-self.reach.cmem_len :]
        if block.compression.loss == "autoencode":
            decoder = block.compression.decoder
            rebuilt = torch.cat([(decoder.weight @ x + decoder.bias).view(ratio, -1) for x in new])
            return [(rebuilt - torch.stack(old)).square().mean()]
        if block.compression.loss == "attention":
            return [self.reconstruction_loss(block, [x.detach() for x in normed], old, new)]
        return []

    def compress(self, block, old, usage):
        ratio, function = self.settings.ratio, self.settings.function
        groups = [old[start : start + ratio] for start in range(0, len(old), ratio)]
        if function == "mean_pool":
            return [sum(group) / ratio for group in groups]
        if function == "max_pool":
            return [
                torch.stack([max(group, key=lambda x, f=f: float(x[f]))[f] for f in range(len(group[0]))])
                for group in groups
            ]
        if function == "most_used":
            kept = sorted(sorted(range(len(old)), key=lambda place: -float(usage[place]))[: len(groups)])
            return [old[place] for place in kept]
        mix, step, first = block.compression.compressor.mix, 1, 0
        if function == "dilated_conv":
            step, first = 2, -((ratio - 1) // 2)
        new = []
        for number in range(len(groups)):
            places = [number * ratio + first + step * tap for tap in range(ratio)]
            taps = [old[place] if 0 <= place < len(old) else torch.zeros_like(old[0]) for place in places]
            width = len(old[0])
            new.append(sum(mix.weight[:, tap * width : (tap + 1) * width] @ x for tap, x in enumerate(taps)) + mix.bias)
        return new

    def reconstruction_loss(self, block, queries, old, new):
        """Algorithm 2, with gradients stopped at all weights of attention; the mean square of the difference."""
        width, inner = block.head_width, len(block.query.weight)
        q_weight, kv_weight = block.query.weight.detach(), block.key_value.weight.detach()
        if self.network.config.norm == "pre":
            norm = block.layer_norm
            old, new = (
                [F.layer_norm(x, x.shape, norm.weight.detach(), norm.bias.detach()) for x in of] for of in (old, new)
            )

        def attn(x, m):
            parts = []
            for head in range(block.n_heads):
                rows = slice(head * width, (head + 1) * width)
                q = q_weight[rows] @ x
                scores = torch.stack([q @ (kv_weight[:inner][rows] @ each) for each in m]) / math.sqrt(width)
                parts.append(
                    sum(w * (kv_weight[inner:][rows] @ each) for w, each in zip(scores.softmax(0), m, strict=True))
                )
            return torch.cat(parts)

        return torch.stack([attn(x, old) - attn(x, new) for x in queries]).square().mean()
