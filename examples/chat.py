"""A chat in the terminal that shows what its cache holds, turn by turn.

    python examples/chat.py                           # SmolLM2, kivi-4bit
    python examples/chat.py MODEL --method tc-2bit

One cache goes through all turns: only what is new is read. An empty line ends the chat.
"""

from itertools import takewhile

import click
from transformers import TextStreamer

from xquant import KVCache, load_model


@click.command()
@click.argument("model_name", metavar="MODEL", default="smollm2")
@click.option("--method", default="kivi-4bit", show_default=True)
@click.option("--max-new-tokens", default=200, show_default=True)
def main(model_name: str, method: str, max_new_tokens: int) -> None:
    """Chat with MODEL, a folder, a name on the hub, or smollm2."""
    model, tokenizer = load_model(model_name)
    cache = KVCache(model, method)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages: list[dict[str, str]] = []
    known: list[int] = []  # the tokens that the cache has seen
    while text := click.prompt("you", default="", show_default=False):
        messages.append({"role": "user", "content": text})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        # The template may write an earlier turn otherwise than the model did: the cache keeps what agrees.
        pairs = zip(known, inputs["input_ids"][0].tolist(), strict=False)
        agreeing = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if agreeing < cache.get_seq_length():
            cache.crop(agreeing)
        out = model.generate(
            **inputs,
            cache=cache,
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            do_sample=False,
        )
        known = out[0].tolist()
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        report = cache.report()
        click.secho(
            f"[{report.tokens:,} tokens in {report.cache_bytes / 1e6:.2f} MB;"
            f" in fp16 {report.full_cache_bytes / 1e6:.2f} MB]",
            dim=True,
        )


if __name__ == "__main__":
    main()
