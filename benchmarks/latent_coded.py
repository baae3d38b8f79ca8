"""What coded latents lose: a small model with latents (MLA), trained here on text, byte by byte.

    python benchmarks/latent_coded.py --train FILE --test FILE --json benchmarks/results/latent-coded.json

No model with latents is small enough to be packaged, and random weights make latents that have no structure
to code. So this trains one for some minutes. Calibrations are of text that it writes itself, as everywhere,
and of text that it was trained on: so little training leaves it with a poor hand. Windows are as long as
those that it was trained on, beyond which it is no model. So are the texts of a calibration: keys and values
of so small a model go on changing with the position.
"""

import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from xquant import parse_method
from xquant.calibrators.run import calibrate_together
from xquant.results import stamp, write_json
from xquant_lab.evals.perplexity import measure

SPECS = (
    *("int8", "q8_0", "kivi-8bit", "kivi-4bit", "kivi-3bit", "kivi-2bit"),
    *("tc-5bit", "tc-4bit", "tc-3bit", "tc-2bit", "tc-cl-4bit", "tc-cl-3bit", "tc-cl-2bit"),
)
WINDOW, BATCH, TEXTS = 512, 8, 24


def small_model() -> Any:
    """Four dense layers whose latents are a third of their input, as wide as all parts of a head."""
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        first_k_dense_replace=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        pad_token_id=0,
        bos_token_id=10,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config)


def bytes_of(file: Path) -> Tensor:
    """int64 ``[T]``."""
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()


def train(model: Any, text: Tensor, steps: int) -> None:
    """By AdamW, on windows drawn from the text; the learning rate falls along a cosine."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    begin = time.perf_counter()
    for step in range(steps):
        starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=generator)
        ids = torch.stack([text[start : start + WINDOW + 1] for start in starts])
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            click.echo(
                f"step {step}: {loss.item():.3f} nats a byte, {time.perf_counter() - begin:.0f} s", err=True
            )


@torch.no_grad()
def written(model: Any, texts: int, length: int) -> Tensor:
    """Texts ``[N, T]`` that the model samples, each begun by another letter."""
    begins = torch.arange(texts)[:, None] % 26 + 65
    torch.manual_seed(2)
    ids: Tensor = model.generate(
        begins,
        attention_mask=torch.ones_like(begins),
        do_sample=True,
        min_new_tokens=length - 1,
        max_new_tokens=length - 1,
    )
    return ids


@click.command()
@click.option("--train", "train_file", required=True, type=click.Path(path_type=Path))
@click.option("--test", "test_file", required=True, type=click.Path(path_type=Path))
@click.option("--steps", default=300, show_default=True)
@click.option("--windows", default=16, show_default=True)
@click.option("--method", "specs", multiple=True, default=SPECS)
@click.option("--json", "target", required=True)
def main(
    train_file: Path,
    test_file: Path,
    steps: int,
    windows: int,
    specs: tuple[str, ...],
    target: str,
) -> None:
    model, text = small_model(), bytes_of(train_file)
    train(model, text, steps)
    model.eval()
    methods = [parse_method(spec) for spec in specs]
    learned = [method for method in methods if method.needs_calibration]
    plain = [method for method in methods if method not in learned]
    ids = bytes_of(test_file)[: WINDOW * windows].view(windows, WINDOW)
    samples = {
        "": None,
        "text that it writes": written(model, TEXTS, WINDOW),
        "text that it was trained on": text[: TEXTS * WINDOW].view(TEXTS, WINDOW),
    }
    rows: list[dict[str, Any]] = []
    for name, own in samples.items():
        made = [] if own is None else calibrate_together(model, own, learned, name)
        for row in measure(model, ids, plain if own is None else learned, made):
            rows.append({**row.to_dict(), "calibrated": name})
            click.echo(
                f"{row.method:12} {row.bits_per_value:.2f} bits  KL {row.kl:.6f}  {row.ratio:.4f}  {name}"
            )
    write_json(target, stamp(rows, model="latents", steps=steps, dtype="float32"))


if __name__ == "__main__":
    main()
