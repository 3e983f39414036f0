"""Train the embedded MoE by wall clock: python -m dualdeadline.pretrain.train --pack FOLDER --train|--bench.

One call trains for --minutes (start, compilation, evaluation and export included) and leaves its state on
this machine's disk; --resume goes on from it, --init-from from exported weights. The rate is
warmup-stable-decay over the planned time of all calls (--calls-left counts this one), so the last call always
ends at rate zero.
"""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from pathlib import Path

import torch

from dualdeadline.pretrain import architectures, checkpoint, data, model
from dualdeadline.pretrain.optim import Optimizer
from dualdeadline.pretrain.options import parser

BORN = time.monotonic()
EXTRA_KEYS = ("step", "tokens", "seconds")


def rate(seconds: float, since: float, total: float, warmup: float, decay: float) -> float:
    """Share of the peak rate after `seconds` of `total`; `since` of them with this optimizer's moments."""
    tail = (total - seconds) / max(decay * total, 1e-9)
    return max(min(1.0, since / max(warmup, 1e-9), tail), 0.0)


class Run:
    """Parameters, optimizer, data cursor and counters of one run.

    Args:
        args: the command line. pack: texts. device: where it trains. forward: a compiled Forward to share.
    """

    def __init__(self, args, pack: data.Pack, device, forward: model.Forward | None = None):
        self.args, self.device, arch = args, device, architectures.ARCHITECTURES[args.architecture]
        self.cfg = arch.config(vocab_size=pack.vocab, **json.loads(args.model))
        fixed = {name: args.synthetic / len(data.SYNTHETIC) for name in data.SYNTHETIC if name in pack.train}
        sizes = {name: len(tokens) for name, tokens in pack.train.items()}
        self.shares = data.mixture(sizes, args.planned_tokens, fixed, args.power, args.epochs)
        self.shares |= json.loads(args.shares)
        self.sampler = data.Sampler(pack.train, self.shares, args.length, device, args.seed)
        given = args.init_from
        start = checkpoint.read_weights(given) if given else arch.initial(self.cfg, args.seed)
        self.params = {name: start[name].to(device).requires_grad_() for name in arch.shapes(self.cfg)}
        self.optimizer = Optimizer(self.params, args.optimizer, args.lr, args.muon_lr, args.weight_decay)
        self.forward = forward or make_forward(args, self.cfg, device)
        self.step, self.tokens, self.seconds, self.born, self.curve = 0, 0, 0.0, 0.0, []

    def resume(self, path: Path) -> None:
        """Continue exactly from a saved state."""
        tensors, meta = checkpoint.load_state(path)
        if meta["optimizer"] != self.args.optimizer:
            raise ValueError(f"{path} was trained with {meta['optimizer']}, not {self.args.optimizer}")
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(tensors[f"param.{name}"])
        self.optimizer.load({key[4:]: value for key, value in tensors.items() if key.startswith("opt.")})
        self.sampler.generator.set_state(tensors["generator"])
        for key in (*EXTRA_KEYS, "born", "curve"):
            setattr(self, key, meta[key])

    def save(self, path: Path) -> None:
        """Save everything `resume` needs."""
        tensors = {f"param.{name}": value for name, value in self.params.items()}
        tensors |= {f"opt.{name}": value for name, value in self.optimizer.state().items()}
        meta = {key: getattr(self, key) for key in (*EXTRA_KEYS, "born", "curve")}
        checkpoint.save_state(path, tensors | {"generator": self.sampler.generator.get_state()},
                              meta | {"optimizer": self.args.optimizer})

    def advance(self, scale: float) -> dict:
        """One step at `scale` times the peak rate; the parts of the loss as device tensors."""
        inputs, targets = self.sampler.draw(self.args.batch)
        loss, parts = self.forward.loss(self.params, inputs, targets, self.args.balance, self.args.z)
        loss.backward()
        parts["norm"] = self.optimizer.step(scale)
        self.step += 1
        self.tokens += inputs.numel()
        return parts

    def warm(self) -> float:
        """Compile forward and backward on one batch without a step; seconds it took."""
        begin, cursor = time.monotonic(), self.sampler.generator.get_state()
        inputs, targets = self.sampler.draw(self.args.batch)
        self.forward.loss(self.params, inputs, targets, self.args.balance, self.args.z)[0].backward()
        for param in self.params.values():
            param.grad = None
        self.sampler.generator.set_state(cursor)
        synchronize(self.device)
        return time.monotonic() - begin

    def agreement(self) -> dict:
        """How far the sparse experts of the first layer are from the dense ones; see `sparse.agreement`."""
        from dualdeadline.pretrain import sparse

        p = {key: value.detach() for key, value in self.forward.layer_params(self.params, 0).items()}
        return sparse.agreement(p["router"], p["gate_up"], p["down"], self.cfg.num_experts_per_tok, self.forward.dtype)


def make_forward(args, cfg, device) -> model.Forward:
    """The forward that the command line asks for."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kind = architectures.of(cfg).Forward
    return kind(cfg, args.length, device, dtype, args.experts, args.compile, args.dropout)


def ready(args, pack: data.Pack, device, state: Path) -> tuple[Run, float]:
    """A run that is warm, resumed if asked, and the seconds of its compilation.

    With `--experts auto` the first form that runs and agrees: sparse, else dense; each compiled, else eager.
    """
    forms = [(args.experts, args.compile)]
    if args.experts == "auto":
        kinds = ("sparse", "dense") if device.type == "cuda" else ("dense",)
        forms = [(kind, how) for how in ((True, False) if args.compile else (False,)) for kind in kinds]
    for experts, compiled in forms:
        args.experts, args.compile = experts, compiled
        try:
            run = Run(args, pack, device)
            if args.resume:
                run.resume(state)
            if experts == "sparse":
                print(f"sparse beside dense experts: {run.agreement()}")
            return run, run.warm()
        except Exception as error:
            # a broken form must not cost the call; what no form can do is raised by the last
            if (experts, compiled) == forms[-1] or isinstance(error, FileNotFoundError):
                raise
            print(f"{experts} experts, compile={compiled}: {type(error).__name__}: {str(error)[:1500]}")
            traceback.print_exc(limit=-3)
    raise AssertionError("no form was tried")


def synchronize(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def loop(run: Run, budget: float, total: float, on_log=None, every: int = 20) -> None:
    """Train for `budget` seconds of a plan of `total` training seconds; logs every `every` steps.

    Raises:
        FloatingPointError: the loss or gradient is not finite (nothing is saved after it).
    """
    begin, first = time.monotonic(), run.seconds
    while (spent := time.monotonic() - begin) < budget:
        run.seconds = first + spent
        scale = rate(run.seconds, run.seconds - run.born, total, run.args.warmup, run.args.decay)
        parts = run.advance(scale)
        if run.step % every == 0:
            check(run, parts, scale, time.monotonic() - begin)
            if on_log:
                on_log(run)
    check(run, parts, scale, time.monotonic() - begin)
    run.seconds = first + time.monotonic() - begin


def check(run: Run, parts: dict, scale: float, spent: float) -> None:
    """Read the last step's numbers (waits for the device), stop if not finite, keep them in the curve."""
    load = parts["load"] * run.cfg.num_experts / run.cfg.num_experts_per_tok
    row = {"step": run.step, "tokens": run.tokens, "seconds": run.seconds, "rate": scale,
           "nats": parts["nats"].item(), "norm": parts["norm"].item(), "z": parts["z"].mean().item(),
           "balance": parts["balance"].mean().item(), "least": load.min().item(), "most": load.max().item()}
    if not math.isfinite(row["nats"] + row["norm"]):
        raise FloatingPointError(f"step {run.step}: loss {row['nats']}, gradient norm {row['norm']}; the last "
                                 "saved state stays. Lower --lr or --muon-lr and --resume")
    run.curve.append({key: round(value, 5) for key, value in row.items()})


@torch.no_grad()
def validate(run: Run, pack: data.Pack, windows: int = 32) -> dict[str, float]:
    """Quick held-out bits per byte by domain: the same windows each time, uncompiled forward."""
    plain = architectures.of(run.cfg).Forward(run.cfg, run.args.length, run.device, run.forward.dtype)
    found = {}
    for name, stream in pack.heldout.items():
        length = min(run.args.length, len(stream.tokens) - 1)
        starts = torch.linspace(0, len(stream.tokens) - 1 - length, windows).long().unique()
        tokens = torch.from_numpy(stream.tokens.astype("int64"))
        rows = torch.stack([tokens[start : start + length + 1] for start in starts]).to(run.device)
        nats = plain.loss(run.params, rows[:, :-1], rows[:, 1:])[1]["nats"].item()
        found[name] = nats / math.log(2) * len(stream.tokens) / int(stream.sizes.sum())
    natural = [value for name, value in found.items() if name not in data.SYNTHETIC]
    return {"macro": sum(natural) / len(natural)} | found


def train(args, pack: data.Pack, out: Path) -> dict:
    """One call: resume or start, train until the clock says stop, save, export, write metrics.json."""
    device, state = torch.device(args.device), Path(args.state) / "state.safetensors"
    run, warm = ready(args, pack, device, state)
    if args.init_from:
        print(f"fresh optimizer on the weights of {args.init_from}")
    budget = 60 * args.minutes - args.reserve - (time.monotonic() - BORN)
    if budget <= 0:
        raise ValueError(f"{args.minutes} minutes leave nothing after {time.monotonic() - BORN:.0f} s  "
                         f"and a reserve of {args.reserve} s; give more --minutes")
    total = run.seconds + budget * args.calls_left
    print(f"start {time.monotonic() - BORN:.0f} s (compile {warm:.0f}); trains {budget:.0f} of {total:.0f} s "
          f"from step {run.step}; mixture {json.dumps({k: round(v, 4) for k, v in run.shares.items()})}", flush=True)
    history, first = [], run.tokens
    loop(run, budget, total, reporter(run, pack, out, state, history))
    keep(run, out, state)
    metrics = summary(run, args, pack, history, budget, first)
    write_json(out / "metrics.json", metrics)
    note(out, metrics["last"])
    return metrics


def note(out: Path, row: dict) -> None:
    """Print a row and add it to log.jsonl."""
    line = json.dumps(row)
    print(line, flush=True)
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(line + "\n")


def keep(run: Run, out: Path, state: Path) -> None:
    """Save the state on this machine and the weights where they come back from."""
    run.save(state)
    checkpoint.export(run.params, run.cfg, out / "model")


def reporter(run: Run, pack: data.Pack, out: Path, state: Path, history: list):
    """What `loop` calls: a held-out score every --report s, also in log.jsonl; weights and state every --save-every."""
    args, now = run.args, time.monotonic()
    clock = {"save": now, "print": now, "tokens": run.tokens}
    out.mkdir(parents=True, exist_ok=True)

    def on_log(run):
        now = time.monotonic()
        if now - clock["print"] > args.report:
            speed = (run.tokens - clock["tokens"]) / (now - clock["print"])
            history.append({"step": run.step, "tokens": run.tokens, "tokens_per_s": round(speed)} | validate(run, pack))
            note(out, run.curve[-1] | history[-1])
            clock.update(print=time.monotonic(), tokens=run.tokens)
        if now - clock["save"] > args.save_every:
            keep(run, out, state)
            clock["save"] = time.monotonic()

    return on_log


def summary(run: Run, args, pack: data.Pack, history: list, budget: float, first: int) -> dict:
    """What metrics.json says of a call; the curve is thinned to at most 400 points."""
    keep = max(1, len(run.curve) // 400)
    last = {"validation": validate(run, pack), "step": run.step, "tokens": run.tokens, "seconds": run.seconds,
            "tokens_per_s": (run.tokens - first) / max(budget, 1e-9), "calls_left": args.calls_left - 1}
    epochs = {name: share * run.tokens / len(pack.train[name]) for name, share in run.shares.items()}
    memory = torch.cuda.max_memory_allocated() if run.device.type == "cuda" else 0
    return {"last": last, "args": vars(args), "shares": run.shares, "epochs": epochs, "peak_bytes": memory,
            "device": torch.cuda.get_device_name() if run.device.type == "cuda" else "a CPU",
            "history": history, "curve": run.curve[::keep] + run.curve[-1:]}


def write_json(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, default=str))


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args = parser().parse_args(argv)
    if args.bench == args.train:
        raise SystemExit("give one of --bench and --train")
    for key, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ.setdefault(key, str(Path(args.state).resolve() / folder))
    torch.set_float32_matmul_precision("high")
    pack, out = data.read(args.pack), Path(args.out)
    if args.bench:
        from dualdeadline.pretrain import bench

        bench.run(args, pack, out)
        return
    metrics = train(args, pack, out)
    from dualdeadline.pretrain import card, evaluate

    rows = evaluate.main(out / "model", pack, out / "records.json", args)
    card.write(out / "model", metrics, rows)


if __name__ == "__main__":
    main()
