"""Train a small language model of GPT-2's architecture on the prose of this project, and export it to ONNX with a cache of keys and values.

usage: train_tiny_gpt.py OUT.onnx [--minutes M]
needs: pip install torch==2.11.0 transformers onnx onnxscript (several GB; never part of CI)
The text is README.md, the guide, the notes of the benches and the comments that document the sources; a token is a byte. The seed is fixed;
the result depends on the number of steps that the minutes allow.
"""
import math, pathlib, re, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
from torch.export import Dim
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import DynamicCache

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTEXT, VOCABULARY = 192, 128


def prose():
    """Paragraphs of the project's texts, in ASCII."""
    texts = [(ROOT / p).read_text() for p in ["README.md", "benches/NOTES.md"]]
    texts += [p.read_text() for p in sorted((ROOT / "compiler/src/guide").glob("*.md"))]
    for source in sorted(ROOT.glob("*/src/**/*.rs")) + sorted(ROOT.glob("compiler/solver/src/**/*.rs")):
        comments = re.findall(r"^\s*//[/!] ?(.*)$|(^\s*$)", source.read_text(), re.M)
        texts.append("\n".join(c for c, _ in comments))
    text = "\n".join(texts).encode("ascii", "ignore").decode()
    text = re.sub(r"```.*?```", "", text, flags=re.S)  # code
    text = "\n".join(line for line in text.split("\n") if not line.startswith("|"))  # tables
    text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
    return re.sub(r"\n\s*\n+", "\n", text)


class Decoder(torch.nn.Module):
    """Logits and the longer cache, of tokens and a cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, past):
        cache = DynamicCache()
        for i, (k, v) in enumerate(past):
            cache.update(k, v, i)
        out = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True, return_dict=True)
        return (out.logits, *[t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)])


def train(model, minutes):
    data = torch.tensor(list(prose().encode()), dtype=torch.long)
    print(f"{len(data)} bytes of text, {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    steps_at_most, started, step = 20000, time.time(), 0
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, betas=(0.9, 0.98))
    model.train()
    while (passed := (time.time() - started) / (60 * minutes)) < 1 and step < steps_at_most:
        rate = 3e-3 * min(1.0, step / 100) * 0.5 * (1 + math.cos(math.pi * passed))
        for group in optimiser.param_groups: group["lr"] = rate
        at = torch.randint(len(data) - CONTEXT - 1, (10,))
        batch = torch.stack([data[i:i + CONTEXT] for i in at])
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 100 == 0: print(f"step {step}: {loss.item():.3f}", flush=True)


def export(model, config, path):
    heads, width = config.n_head, config.n_embd // config.n_head
    past = [(torch.randn(2, heads, 5, width), torch.randn(2, heads, 5, width)) for _ in range(config.n_layer)]
    batch, seq, length = Dim("batch", min=1, max=64), Dim("seq", min=1, max=CONTEXT), Dim("past", min=0, max=CONTEXT - 1)
    cache = [({0: batch, 2: length}, {0: batch, 2: length}) for _ in past]
    names = lambda kind: [f"{kind}.{i}.{part}" for i in range(config.n_layer) for part in ("key", "value")]
    with torch.no_grad():
        torch.onnx.export(Decoder(model.eval()), (torch.randint(0, VOCABULARY, (2, 3)), past), path, opset_version=20, dynamo=True,
                          dynamic_shapes=({0: batch, 1: seq}, cache), external_data=False, verbose=False,
                          input_names=["input_ids"] + names("past"), output_names=["logits"] + names("present"))


if __name__ == "__main__":
    minutes = float(sys.argv[sys.argv.index("--minutes") + 1]) if "--minutes" in sys.argv else 8.0
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=96, n_head=4, vocab_size=VOCABULARY, n_positions=CONTEXT, bos_token_id=None, eos_token_id=None,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config)
    train(model, minutes)
    export(model, config, sys.argv[1])
