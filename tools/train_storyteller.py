"""Creates the built-in model from a seed: generates data, trains, evaluates and exports `models/storyteller`.

    python tools/train_storyteller.py data   --tales ../shared/data/stories   # documents and tokenizer into --work
    python tools/train_storyteller.py train                                  # an hour on a CPU core, minutes on a GPU
    python tools/train_storyteller.py export                                  # held-out loss, samples, model directory
    python tools/train_storyteller.py pairs                                   # are both requested characters named?

For a second stage, run the first three again with `--start models/storyteller` and another `--work`. The model card
lists the commands that were run.

All intermediate files are in the folder `--work` (default build/storyteller). `train` resumes from its last checkpoint.
It starts its final decay early when a file named `finish` appears in that folder.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from storyteller import data, pairs
from storyteller.export import PAIR_SEEDS, Teller, export
from storyteller.init import plant_copying
from storyteller.model import Llama, Shape
from storyteller.training import Plan, Trainer, load_parameters
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER_DOCUMENTS = 6000
HELD_OUT_STORIES = 100


def build_data(args: argparse.Namespace) -> None:
    """Writes tokenizer.json, the training documents as one flat array with their lengths, and the held-out rows."""
    work, seed = args.work, args.seed
    work.mkdir(parents=True, exist_ok=True)
    rng, tales = random.Random(seed), data.read_tales(args.tales)
    texts = list(data.documents(rng, tales, args.documents, args.chat_share))
    if args.start is None:
        tokenizer = data.train_tokenizer(texts[:TOKENIZER_DOCUMENTS], Shape().vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    tokenizer.save(str(work / "tokenizer.json"))
    docs = data.encode(tokenizer, texts)
    np.save(work / "tokens.npy", np.concatenate(docs).astype(np.uint16))
    np.save(work / "lengths.npy", np.array([len(doc) for doc in docs], np.int32))
    other = random.Random(seed + 1)
    stories = data.encode(tokenizer, [data.story_document(other) for _ in range(HELD_OUT_STORIES)])
    chats = data.encode(tokenizer, [data.chat_document(other) for _ in range(HELD_OUT_STORIES)])
    old = data.encode(tokenizer, tales.held_out)
    np.savez(work / "held_out.npz", stories=_rows(stories, 24), chats=_rows(chats, 16), tales=_rows(old, 16))
    print(f"{len(docs)} documents, {sum(map(len, docs))} tokens, mean {np.mean([len(d) for d in docs]):.0f}")
    print("same text twice:", len(texts) - len(set(texts)))


def _rows(docs: list[np.ndarray], num: int, length: int = 512) -> np.ndarray:
    flat = np.concatenate(docs)
    num = min(num, len(flat) // (length + 1))
    return flat[: num * (length + 1)].reshape(num, length + 1)


def load_documents(work: Path) -> list[np.ndarray]:
    tokens, lengths = np.load(work / "tokens.npy").astype(np.int32), np.load(work / "lengths.npy")
    return np.split(tokens, np.cumsum(lengths)[:-1])


def train(work: Path, plan: Plan, seed: int, start: Path | None) -> None:
    """Trains from random weights with a planted copying circuit, or from the weights in the exported directory `start`
    if it is given.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Llama(Shape())
    if start is None:
        plant_copying(model)
    else:
        load_parameters(model, {f"model.{n}": t for n, t in load_file(start / "model.safetensors").items()})
    model.to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters on {device}", flush=True)
    held_out = dict(np.load(work / "held_out.npz"))
    vocab_size = model.shape.vocab_size
    curriculum = data.CURRICULUM if start is None else data.TUNING
    batches = data.Batches(load_documents(work), plan.batch_tokens, seed, vocab_size, curriculum)
    rng = np.random.default_rng(seed + 1)
    copying = np.stack([data.drill_row(rng, 256, vocab_size) for _ in range(8)])
    Trainer(model, batches, held_out | {"copying": copying}, plan, work).run()


def measure_pairs(directory: Path) -> None:
    """Prints, for each pair of requested characters, how many stories of an exported model are about both, and how many
    answers ended by themselves.
    """
    teller = Teller(directory, Tokenizer.from_file(str(directory / "tokenizer.json")))
    for pair, (told, ended) in pairs.rates(teller.answer, PAIR_SEEDS).items():
        print(*pair, f"both in {told}, ended {ended} of {len(PAIR_SEEDS)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("data", "train", "export", "pairs"))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "storyteller")
    parser.add_argument("--tales", type=Path, default=ROOT.parent / "shared" / "data" / "stories")
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "storyteller")
    parser.add_argument(
        "--start", type=Path, help="exported directory: keep its tokenizer and continue from its weights"
    )
    parser.add_argument("--chat-share", type=float, default=0.14, help="share of the documents that are chats")
    parser.add_argument("--documents", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=Plan().max_steps)
    parser.add_argument("--decay-steps", type=int, default=Plan().decay_steps)
    parser.add_argument("--lr", type=float, default=Plan().lr)
    parser.add_argument("--decay-at", help="HH:MM UTC: start the decay no later")
    parser.add_argument("--end-at", help="HH:MM UTC: end no later")
    args = parser.parse_args()
    if args.what == "data":
        build_data(args)
    elif args.what == "train":
        hold_steps = Plan().hold_steps if args.start is None else 0
        plan = Plan(
            args.steps, args.decay_steps, lr=args.lr, hold_steps=hold_steps, decay_at=args.decay_at, end_at=args.end_at
        )
        train(args.work, plan, args.seed, args.start)
    elif args.what == "pairs":
        measure_pairs(args.out)
    else:
        run = {"seed": args.seed, "lr": args.lr, "planned_steps": args.steps}
        export(args.work, args.out, args.start, run)


if __name__ == "__main__":
    main()
