// Try a prompt and watch it stream. Several streams share one request, so they share one connection too; the first one is
// shown, with a mark where a fault fell into it.

import { ask, dataOf } from "./api.js";
import { make, number, say } from "./words.js";

const MAX_TOKENS = 400;
const DRAW_MS = 50;
const FIGURES_MS = 250;

export class Prompt {
  constructor(store) {
    this.store = store;
    this.form = document.getElementById("try-form");
    this.input = document.getElementById("try-prompt");
    this.streams = document.getElementById("try-streams");
    this.again = document.getElementById("try-again");
    this.button = document.getElementById("try-send");
    this.text = document.getElementById("try-text");
    this.figures = document.getElementById("try-figures");
    this.abort = null;
    this.timer = null;
    this.behind_s = 0; // this page's clock, less the server's
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else this.run();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        this.form.requestSubmit();
      }
    });
  }

  /** Faults that began while the text was written get a mark at their place. */
  update(news) {
    const tick = news.ticks[news.ticks.length - 1];
    if (tick) this.behind_s = Date.now() / 1000 - tick.unix_s;
    for (const entry of news.entries ?? []) if (entry.kind === "fault") this.#mark(entry);
  }

  async run() {
    this.abort = new AbortController();
    say(this.button, "Stop");
    try {
      do await this.#write();
      while (this.again.checked && !this.abort.signal.aborted);
    } catch (error) {
      if (error.name !== "AbortError") this.text.append(make("p", { className: "error", textContent: error.message }));
    } finally {
      this.abort = null;
      say(this.button, "Write");
    }
  }

  async #write() {
    const prompt = this.input.value || " ";
    const num = Number(this.streams.value);
    this.chunks = []; // of the stream that is shown: [seconds since 1970, text node]
    this.pending = []; // nodes that are not on the page yet
    this.marks = new Map(); // by the entry's id
    this.began_s = Date.now() / 1000;
    this.num_tokens = 0;
    this.text.replaceChildren(make("b", { textContent: prompt }));
    // The others write something else: equal streams would share their KV, and prove less.
    const prompts = Array.from({ length: num }, (_, i) => (i ? `${i + 1}. ${prompt}` : prompt));
    const body = { model: this.store.hello?.models[0], prompt: prompts, max_tokens: MAX_TOKENS, stream: true, ignore_eos: true };
    const response = await ask("v1/completions", { body, signal: this.abort.signal });
    for await (const data of dataOf(response)) {
      if (data === "[DONE]") return;
      const { choices, error } = JSON.parse(data);
      if (error) throw new Error(error.message);
      for (const choice of choices) this.#token(choice, num);
    }
  }

  #token(choice, num) {
    this.num_tokens += 1;
    if (choice.index === 0) {
      const node = document.createTextNode(choice.text);
      this.chunks.push([Date.now() / 1000, node]);
      if (this.pending.push(node) === 1) setTimeout(() => this.#draw(), DRAW_MS);
    }
    this.timer ??= setTimeout(() => {
      this.timer = null;
      say(this.figures, `${num} stream${num > 1 ? "s" : ""}, ${number(this.num_tokens)} tokens`);
    }, FIGURES_MS);
  }

  /** Several at a time: laying the page out for every token would take the CPU from those who compute them. */
  #draw() {
    const atEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 24;
    this.text.append(...this.pending.splice(0));
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  #mark(entry) {
    const text = entry.title.replace(/ \(SIG.*/, "");
    const known = this.marks?.get(entry.id);
    if (known) say(known, text); // more is known about it by now
    const at_s = entry.unix_s + this.behind_s;
    if (known || !this.chunks?.length || at_s < this.began_s) return;
    const after = this.chunks.find(([arrived_s]) => arrived_s > at_s);
    if (!after && !this.abort) return; // it came after the end
    const mark = make("mark", { textContent: text });
    this.marks.set(entry.id, mark);
    if (after?.[1].isConnected) after[1].before(mark);
    else this.text.append(mark);
  }
}
