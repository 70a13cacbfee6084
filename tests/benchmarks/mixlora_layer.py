"""What a MixLoRA FFN costs beside the public package's block and beside a plain LoRA FFN.

    make bench        or        python tests/benchmarks/mixlora_layer.py --repeats 21

Forward and backward pass of one FFN of Llama's form in float32, N 8, k 2, r 16; ours, the block of the `mixlora`
package with the same weights, and PEFT's LoRA on the same three projections take turns, so a machine that slows down
slows all three. Ratios are medians over repetitions.

The counted limit: the frozen products cost the same in all but the package, which applies the down-projection once a
chosen expert (k times). What ours has beyond plain LoRA is elementwise work on k hidden states a token instead of one,
done again in the backward pass to save memory; its share falls as the frozen matrices grow.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from components.config import MixLoraConfig
from components.models.mixlora.layer import MixLoraFfn
from components.models.mixlora.routing import RoutingRecorder

SIZES = ((576, 1536, 768), (2048, 5632, 512))
"""d, h and tokens: SmolLM2-135M's FFN, and one like a 1B model's."""
EXPERTS = (4, 8, 16, 32, 64)
RANK = 16


def ffn(d: int, h: int) -> nn.Module:
    """A frozen Llama FFN."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    return LlamaMLP(LlamaConfig(hidden_size=d, intermediate_size=h, num_attention_heads=1)).requires_grad_(False)


def ours(base: nn.Module, experts: int) -> MixLoraFfn:
    """Our layer, away from its start so that no product is with zeros."""
    spec = MixLoraConfig(r=RANK, alpha=2 * RANK, num_experts=experts, top_k=2)
    module = MixLoraFfn(base, base.act_fn, spec, RoutingRecorder())  # type: ignore[arg-type]
    for name, parameter in module.named_parameters():
        if name.startswith("lora_B"):
            nn.init.normal_(parameter, std=0.05)
    return module


def package(module: MixLoraFfn) -> Any:
    """The `mixlora` package's block over the same tensors; None where it is not installed."""
    try:
        from mixlora.config import MixLoraConfig as PublicConfig
        from mixlora.lora_linear import LoraLinear
        from mixlora.model import MixLoraSparseMoe
    except ImportError:
        return None
    names = ("gate_proj", "up_proj", "down_proj")
    stated = {"base_model_name_or_path": "", "task_type": "CAUSAL_LM", "peft_type": "MIXLORA", "lora_dropout": 1e-9}
    stated |= {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(names), "routing_strategy": "mixlora"}
    config = PublicConfig.from_config(stated | {"num_experts": module.num_experts, "top_k": module.router.top_k})
    config.model_type_, config.dtype_, config.act_fn_ = "llama", torch.float32, module.activation
    block = MixLoraSparseMoe(module.base, config)
    block.gate_ = module.router.weight
    for name in names:
        a, b = module.pair(name)
        for e in range(module.num_experts):
            linear = LoraLinear(getattr(module.base, name), config, (a[e], b[e])).eval()
            block.experts_[f"experts.{e}.{name}"] = linear
    return block


def lora(base: nn.Module) -> nn.Module:
    """PEFT's LoRA on a copy of the FFN."""
    import copy

    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["gate_proj", "up_proj", "down_proj"])
    module = inject_adapter_in_model(config, copy.deepcopy(base))
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return module


def seconds(run: Callable[[Tensor], Tensor], x: Tensor, wanted: Iterable[Tensor]) -> float:
    """Wall time of one forward and backward pass."""
    begun = time.perf_counter()
    torch.autograd.grad(run(x).sum(), [x, *wanted], allow_unused=True)
    return time.perf_counter() - begun


def measure(d: int, h: int, tokens: int, experts: int, repeats: int) -> dict[str, Any]:
    """Medians of one size."""
    torch.manual_seed(0)
    base = ffn(d, h)
    mixture, plain = ours(base, experts), lora(base)
    block = package(mixture)
    x = torch.randn(1, tokens, d, requires_grad=True)
    mine = [p for p in mixture.parameters() if p.requires_grad]
    theirs = [p for p in plain.parameters() if p.requires_grad]
    runs = {"ours": (mixture, mine), "lora": (plain, theirs)}
    if block is not None:
        shared = [mixture.router.weight, *(p for pair in block.experts_.values() for p in pair.parameters())]
        runs["package"] = (lambda z: block.forward(z.clone()), [p for p in shared if p.requires_grad])
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repeats + 1):
        for name, (run, wanted) in runs.items():
            taken = seconds(run, x, wanted)
            if repetition > 0:  # the first one warms up
                times[name].append(taken)
    found: dict[str, Any] = {"d": d, "h": h, "tokens": tokens, "experts": experts}
    found["ours_ms"] = 1e3 * statistics.median(times["ours"])
    for peer in runs.keys() - {"ours"}:
        found[f"{peer}_ms"] = 1e3 * statistics.median(times[peer])
    found["ours_over_lora"] = statistics.median(a / b for a, b in zip(times["ours"], times["lora"], strict=True))
    if block is not None:
        pairs = zip(times["package"], times["ours"], strict=True)
        found["package_over_ours"] = statistics.median(a / b for a, b in pairs)
    return found


def main() -> None:
    """Measures and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(*size, 8, arguments.repeats) for size in SIZES]
    rows += [measure(*SIZES[0], experts, arguments.repeats) for experts in EXPERTS if experts != 8]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"one FFN, forward and backward, k 2, r {RANK}, float32, torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} threads, {platform.machine()}")
    print("    d     h  tokens   N      ours   package      LoRA   package/ours   ours/LoRA")
    for row in rows:
        print(
            f"{row['d']:>5} {row['h']:>5} {row['tokens']:>7} {row['experts']:>3} {row['ours_ms']:>7.1f}ms "
            f"{row.get('package_ms', float('nan')):>7.1f}ms {row['lora_ms']:>7.1f}ms "
            f"{row.get('package_over_ours', float('nan')):>13.2f}x {row['ours_over_lora']:>10.2f}x"
        )


if __name__ == "__main__":
    main()
