"""Step 2 of 3: train the model on the token ids.

    python scripts/train_model/train.py build/train build/train/weights.npz --device cuda

Needs `torch` and `numpy` only. Writes the weights that did best on the held-out paragraphs.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 4096
HIDDEN_SIZE = 192
INTERMEDIATE_SIZE = 480
NUM_LAYERS = 7
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4, 32
ROPE_THETA = 10_000.0
NORM_EPS = 1e-6
CONTEXT = 2048
EVAL_ROWS = 16
NUM_EVALS = 25


class Layer(nn.Module):
    """One layer of Qwen3, with the names that Hugging Face gives to its tensors."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        width, kv_width = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
        self.input_layernorm = nn.RMSNorm(HIDDEN_SIZE, eps=NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN_SIZE, eps=NORM_EPS)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(HIDDEN_SIZE, width, bias=False),
                "k_proj": nn.Linear(HIDDEN_SIZE, kv_width, bias=False),
                "v_proj": nn.Linear(HIDDEN_SIZE, kv_width, bias=False),
                "o_proj": nn.Linear(width, HIDDEN_SIZE, bias=False),
                "q_norm": nn.RMSNorm(HEAD_DIM, eps=NORM_EPS),
                "k_norm": nn.RMSNorm(HEAD_DIM, eps=NORM_EPS),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(HIDDEN_SIZE, INTERMEDIATE_SIZE, bias=False),
                "up_proj": nn.Linear(HIDDEN_SIZE, INTERMEDIATE_SIZE, bias=False),
                "down_proj": nn.Linear(INTERMEDIATE_SIZE, HIDDEN_SIZE, bias=False),
            }
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self._attend(self.input_layernorm(hidden), cos, sin))
        inputs = self.post_attention_layernorm(hidden)
        gated = F.silu(self.mlp["gate_proj"](inputs)) * self.mlp["up_proj"](inputs)
        return hidden + self.dropout(self.mlp["down_proj"](gated))

    def _attend(self, inputs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part = self.self_attn
        queries, keys, values = (
            part[name](inputs).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        queries = _rotate(part["q_norm"](queries), cos, sin).to(values.dtype)
        keys = _rotate(part["k_norm"](keys), cos, sin).to(values.dtype)
        group = NUM_HEADS // NUM_KV_HEADS
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return part["o_proj"](attended.transpose(1, 2).flatten(2))


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Model(nn.Module):
    """A Qwen3 decoder whose embedding is also its output layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(HIDDEN_SIZE, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)
        frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angles = torch.outer(torch.arange(CONTEXT).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(self._initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.embed_tokens(tokens))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return F.linear(self.norm(hidden), self.embed_tokens.weight)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            last = module.out_features == HIDDEN_SIZE
            nn.init.normal_(module.weight, std=0.03 / (math.sqrt(2 * NUM_LAYERS) if last else 1))
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


@dataclass(frozen=True, slots=True)
class Batches:
    """Random rows of both texts: any place in a book, or the start of a chat and what follows."""

    train: Tensor
    chats: Tensor
    length: int
    batch_size: int
    chat_share: float

    def __iter__(self) -> Iterator[Tensor]:
        end_of_text = self.chats[-1]
        starts = torch.nonzero(self.chats[: -self.length - 1] == end_of_text).flatten() + 1
        offsets = torch.arange(self.length + 1, device=self.train.device)
        num_chats = round(self.batch_size * self.chat_share)
        while True:
            places = torch.randint(
                len(self.train) - self.length - 1, (self.batch_size - num_chats, 1)
            ).to(offsets.device)
            chosen = torch.randint(len(starts), (num_chats, 1)).to(offsets.device)
            yield torch.cat((self.train[places + offsets], self.chats[starts[chosen] + offsets]))


def loss_of(model: nn.Module, rows: Tensor, device: str) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=device != "cpu"):
        logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, valid: Tensor, length: int, device: str) -> float:
    model.eval()
    rows = valid[: (len(valid) - 1) // length * length + 1].unfold(0, length + 1, length)
    losses = [loss_of(model, part, device) * len(part) for part in rows.split(EVAL_ROWS)]
    model.train()
    return torch.stack(losses).sum().item() / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=CONTEXT)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--chat-share", type=float, default=0.3)
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    train, valid, chats = (
        torch.from_numpy(np.load(arguments.folder / f"{name}.npy").astype(np.int64)).to(
            arguments.device
        )
        for name in ("train", "valid", "chats")
    )
    model = Model(arguments.dropout).to(arguments.device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    run(model, train=train, valid=valid, chats=chats, arguments=arguments)


def run(
    model: Model, *, train: Tensor, valid: Tensor, chats: Tensor, arguments: argparse.Namespace
) -> None:
    device, steps = arguments.device, arguments.steps
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": arguments.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=arguments.learning_rate,
        betas=(0.9, 0.98),
        fused=device != "cpu",
    )
    batches = iter(
        Batches(train, chats, arguments.length, arguments.batch_size, arguments.chat_share)
    )
    best, since, step, progress = math.inf, time.monotonic(), 0, 0.0
    while progress < 1:
        set_learning_rate(optimizer, arguments.learning_rate, step, progress)
        loss = loss_of(model, next(batches), device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        # On a slow machine the training ends with the time instead of the steps.
        took_s = time.monotonic() - since
        progress = max(step / steps, took_s / arguments.max_seconds)
        if step % max(1, steps // NUM_EVALS) and progress < 1:
            continue
        current = held_out_loss(model, valid, arguments.length, device)
        print(
            f"step {step}: {took_s:.0f} s, train {loss.item():.3f}, held out {current:.3f}",
            flush=True,
        )
        if current < best:
            best = current
            save(model, arguments.output)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, peak: float, step: int, progress: float
) -> None:
    """Rise in 100 steps, then fall along a cosine."""
    warm = min(1.0, (step + 1) / 100)
    for group in optimizer.param_groups:
        group["lr"] = peak * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)


def save(model: Model, path: Path) -> None:
    """Write the weights as float16 by the names of Hugging Face."""
    np.savez(
        path,
        **{f"model.{k}": v.detach().half().cpu().numpy() for k, v in model.state_dict().items()},
    )


if __name__ == "__main__":
    main()
