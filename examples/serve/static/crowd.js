// Others who ask at the same time, so that there is something to see in the pipeline. Four at most: browsers open six
// connections to a server, of which the lanes and the conversation need one each.

import { ApiError, stream } from "./api.js";

const QUESTIONS = [
  "Tell me a story about a lighthouse.",
  "What is a good breakfast?",
  "Describe a walk through a forest.",
  "How does a bicycle stay upright?",
  "Write about the moon.",
  "What makes bread rise?",
];

export class Crowd {
  #running = new Set();
  #wanted = 0;
  #answered = 0;
  #refused = 0;

  constructor(slider, shown, told, model) {
    this.told = told;
    this.model = model;
    slider.addEventListener("input", () => {
      this.#wanted = Number(slider.value);
      shown.value = slider.value;
      this.#adjust();
    });
    slider.value = "0"; // browsers remember what it was
  }

  #adjust() {
    while (this.#running.size < this.#wanted) this.#begin();
    for (const stop of [...this.#running].slice(this.#wanted)) {
      stop.abort();
      this.#running.delete(stop);
    }
    this.#tell();
  }

  async #begin() {
    const stop = new AbortController();
    this.#running.add(stop);
    for (let i = Math.floor(Math.random() * QUESTIONS.length); this.#running.has(stop); i++) {
      const messages = [{ role: "user", content: QUESTIONS[i % QUESTIONS.length] }];
      try {
        const body = { model: await this.model(), messages, max_tokens: 96, temperature: 1 };
        for await (const _ of stream(body, stop.signal)); // nobody reads it
        this.#answered += 1;
      } catch (error) {
        if (error.name === "AbortError") return;
        this.#refused += 1;
        const seconds = error instanceof ApiError && error.retryAfter ? error.retryAfter : 2;
        await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
      }
      this.#tell();
    }
  }

  #tell() {
    const refused = this.#refused ? `, ${this.#refused} were told to come again later` : "";
    this.told.textContent = this.#answered || this.#refused ? `${this.#answered} of their texts are done${refused}` : "";
  }
}
