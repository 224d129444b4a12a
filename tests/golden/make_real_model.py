"""Write greedy continuations of a real instruction-tuned checkpoint, as transformers computes them.

    python -m venv VENV && VENV/bin/pip install -r tests/golden/requirements.txt
    VENV/bin/python tests/golden/make_real_model.py FOLDER OUT.json     # FOLDER: a checkpoint

smollm2_135m_instruct.json was made from SmolLM2-135M-Instruct. Weights are cast to float32; one
prompt at a time, argmax, no penalties, at most 64 new tokens. The file is a list of

    kind              "plain" or "chat" (through the checkpoint's chat template)
    prompt            text, or the list of messages
    prompt_token_ids  what the tokenizer made of it
    token_ids         the generated ids, without the end-of-text id that ended them
    text              token_ids decoded, special tokens skipped
    finish_reason     "stop" (end-of-text id) or "length"
    min_top2_gap      smallest difference, in logits, between the best and the second best token

A prompt whose continuation meets a near tie is refused: rounding alone could turn it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

NEW_TOKENS = 64
MIN_GAP = 2e-3

STORY = (
    "The river had always been there. Before the road, before the mill, before the first"
    " stone of the first house, it came down from the hills in spring, brown and loud, and in"
    " summer it lay between its banks like something asleep. People in the village told the"
    " time by it. When the water reached the third step of the old landing, it was time to"
    " sow; when the fourth step was dry, it was time to mow. Nobody had ever measured anything"
    " else. Then, one year, an engineer came from the city with a brass instrument on three"
    " legs, a notebook and two assistants. He stood on the bridge for eleven days, and on"
    " every one of them he wrote down numbers: the width, the depth, the speed at the middle"
    " and at both sides, the temperature at noon and at midnight. The children followed him"
    " everywhere and carried his poles. On the twelfth day he closed the notebook, had a glass"
    " of plum brandy with the mayor, and told him that the river was moving. Not the water, he"
    " said, the river itself: a hand's breadth every year, towards the church. The mayor"
    " laughed and poured him another glass. But that night he could not sleep, and before dawn"
    " he took a lantern, walked down to the landing and"
)
BEES = (
    "Summarize this in two sentences. Bees live in colonies of up to sixty thousand workers,"
    " one queen and, in summer, a few hundred drones. A worker lives for about six weeks in"
    " summer. For the first three weeks she stays inside: she cleans cells, feeds larvae,"
    " builds comb, receives nectar and guards the entrance. After that she becomes a forager"
    " and visits flowers within three kilometres of the hive. When she finds a rich patch she"
    " returns and dances. The angle of the dance against the vertical shows the direction"
    " against the sun, and its duration shows the distance. The other workers follow her in"
    " the dark, touch her with their antennae and then fly out on their own. In autumn the"
    " colony throws out the drones, and the bees that hatch then live for six months. They"
    " form a cluster around the queen, shiver with their flight muscles and eat honey, so that"
    " the middle of the cluster stays at about twenty-five degrees even in hard frost."
)
PLAIN = [
    "The capital of France is",
    "Hello",
    "1, 2, 3, 4, 5, 6,",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Shopping list:\n- milk\n- eggs\n- bread\n-",
    "Le café était fermé, alors nous sommes allés à la plage 🏖️ et",
    "Q: What is photosynthesis?\nA:",
    STORY,
]
CHAT = [
    [("user", "Hi")],
    [("user", "What is 2 + 2?")],
    [("user", "Write a haiku about autumn leaves.")],
    [("system", "You are a pirate. Answer briefly."), ("user", "Where is the treasure?")],
    [("user", "Write a Python function that reverses a string.")],
    [("user", "Translate to English: « Où est la bibliothèque ? » 📚")],
    [
        ("user", "Name three primary colors."),
        ("assistant", "Red, yellow and blue."),
        ("user", "Now name three planets, as a numbered list."),
    ],
    [("user", BEES)],
]


def complete(model: Any, tokenizer: Any, prompt_ids: list[int]) -> dict[str, Any]:
    """Greedy continuation of one prompt and the smallest gap on the way."""
    ids = torch.tensor([prompt_ids])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,  # never used: one prompt at a time
        return_dict_in_generate=True,
        output_logits=True,
    )
    new = out.sequences[0, len(prompt_ids) :].tolist()
    best = torch.cat(out.logits).topk(2).values
    eos = model.generation_config.eos_token_id
    stopped = new[-1] in (eos if isinstance(eos, list) else [eos])
    new = new[:-1] if stopped else new
    return {
        "prompt_token_ids": prompt_ids,
        "token_ids": new,
        "text": tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        "finish_reason": "stop" if stopped else "length",
        "min_top2_gap": float((best[:, 0] - best[:, 1]).min()),
    }


def main(folder: str, out: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    records: list[dict[str, Any]] = []
    for text in PLAIN:
        ids = tokenizer(text)["input_ids"]
        records.append({"kind": "plain", "prompt": text} | complete(model, tokenizer, ids))
    for turns in CHAT:
        messages = [{"role": role, "content": content} for role, content in turns]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        records.append({"kind": "chat", "prompt": messages} | complete(model, tokenizer, ids))
    ties = [r["prompt"] for r in records if r["min_top2_gap"] < MIN_GAP]
    if ties:
        raise SystemExit(f"near ties, replace these prompts: {ties}")
    Path(out).write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
