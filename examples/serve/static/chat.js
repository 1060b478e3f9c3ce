// The conversation: what is asked, and the answers as they are written.

import { ApiError, stream } from "./api.js";

export class Chat {
  #turns = [];
  #stopped = null;

  constructor(page, model) {
    const at = (id) => page.getElementById(id);
    this.model = model;
    this.log = at("log");
    this.empty = at("empty");
    this.question = at("question");
    this.send = at("send");
    this.stop = at("stop");
    this.fields = { temperature: at("temperature"), max_tokens: at("max-tokens"), seed: at("seed") };

    at("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(this.question.value.trim());
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        at("ask").requestSubmit();
      }
    });
    this.question.addEventListener("input", () => this.#fit());
    this.stop.addEventListener("click", () => this.#stopped?.abort());
    at("new").addEventListener("click", () => this.clear());
    for (const idea of page.querySelectorAll(".idea")) {
      idea.addEventListener("click", () => this.ask(idea.textContent));
    }
  }

  /** Begins anew. */
  clear() {
    this.#stopped?.abort();
    this.#turns = [];
    this.log.replaceChildren(this.empty);
    this.question.focus();
  }

  /** Asks, and shows the answer while it is written. */
  async ask(question) {
    if (!question || this.#stopped) return;
    this.question.value = "";
    this.#fit();
    this.empty.remove();
    this.#show("user").words.textContent = question;
    const turns = this.#turns;
    turns.push({ role: "user", content: question });
    const shown = this.#show("assistant");
    shown.turn.classList.add("writing");
    const stopped = (this.#stopped = new AbortController());
    this.#busy(true);
    const began = performance.now();
    let text = "";
    let first = null;
    try {
      const body = { model: await this.model(), messages: turns, ...this.#options() };
      const done = (usage, reason) => (shown.note.textContent = summary(usage, reason, began, first));
      for await (const piece of stream(body, stopped.signal, done)) {
        first ??= performance.now();
        text += piece;
        this.#keepBelow(() => (shown.words.textContent = text));
      }
    } catch (error) {
      if (error.name === "AbortError") {
        shown.note.textContent = "stopped";
      } else {
        shown.turn.classList.add("failed");
        const again = error instanceof ApiError && error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
        shown.note.textContent = error instanceof ApiError ? error.message + again : "The server cannot be reached.";
      }
    } finally {
      shown.turn.classList.remove("writing");
      // What was asked in vain is not asked again with the next question.
      if (text) turns.push({ role: "assistant", content: text });
      else turns.pop();
      if (this.#stopped === stopped) this.#stopped = null;
      this.#busy(this.#stopped !== null);
    }
  }

  #options() {
    const given = {};
    for (const [name, field] of Object.entries(this.fields)) {
      if (field.value !== "" && field.checkValidity()) given[name] = Number(field.value);
    }
    return given;
  }

  #show(role) {
    const turn = document.createElement("article");
    turn.className = `turn ${role}`;
    turn.setAttribute("aria-label", role === "user" ? "You" : "The model");
    const [words, note] = ["words", "note"].map((name) => {
      const part = document.createElement("div");
      part.className = name;
      turn.append(part);
      return part;
    });
    this.#keepBelow(() => this.log.append(turn), true);
    return { turn, words, note };
  }

  /** Changes the log; whoever looks at its end goes on doing so. */
  #keepBelow(change, always = false) {
    const below = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    change();
    if (below || always) this.log.scrollTop = this.log.scrollHeight;
  }

  #busy(busy) {
    // Readers of the screen are told of an answer when it is complete, not letter by letter.
    this.log.setAttribute("aria-busy", String(busy));
    this.send.hidden = busy;
    this.stop.hidden = !busy;
    if (!busy) this.question.focus({ preventScroll: true });
  }

  #fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${this.question.scrollHeight + 2}px`;
  }
}

function summary(usage, reason, began, first) {
  const n = usage.completion_tokens;
  const seconds = (performance.now() - (first ?? began)) / 1000;
  const rate = n > 1 && seconds > 0 ? `, ${((n - 1) / seconds).toFixed(1)} a second` : "";
  const wait = first === null ? "" : `, the first after ${((first - began) / 1000).toFixed(2)} s`;
  return `${n} tokens${wait}${rate}${reason === "length" ? "; cut at its limit" : ""}`;
}
