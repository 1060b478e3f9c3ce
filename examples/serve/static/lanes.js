// A picture of the pipeline: a lane for each device, the splits that it computed as blocks, coloured by evaluation.

const WINDOW_S = 3; // what a lane shows
const LATE_S = 0.6; // by how much it lags behind: what ends meanwhile must have been told
const HELD_S = 60; // how long the picture can be held still
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Neighbours differ: each evaluation's hue is far from the one before; kinds of work have hues of their own. */
function hue(source, evaluation) {
  return source === 0 ? 195 + ((evaluation * 55.6) % 145) : 30 + ((evaluation * 55.6) % 70);
}

export class Lanes {
  #lanes = new Map();
  #offset = null; // the server's clock, less ours
  #tokens = []; // when how many had been written
  #steps = []; // when steps ended
  #drawn = 0;
  #sources = [];
  #held = null; // while a lane is pointed at, the picture stays: the time at its right edge

  onfigures = () => {};
  onconnection = () => {};
  onpointed = () => {};

  constructor(place) {
    this.place = place;
    requestAnimationFrame((now) => this.#frame(now));
  }

  /** Follows the server's events; the browser connects anew by itself. */
  watch(url) {
    const source = new EventSource(url);
    source.onerror = () => {
      this.onconnection(false);
      this.#offset = null;
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.watch(url), 5000);
    };
    source.onmessage = (event) => {
      const told = JSON.parse(event.data);
      this.onconnection(true);
      if (told.backends) this.#begin(told);
      else this.#add(told);
    };
  }

  /** Colours have changed. */
  restyle() {
    for (const lane of this.#lanes.values()) lane.style = null;
  }

  #begin(told) {
    this.#lanes.clear();
    this.#sources = told.sources;
    this.#point(null);
    this.place.replaceChildren(...told.backends.map((name) => this.#lane(name)));
  }

  #lane(name) {
    const make = (tag, className, ...children) => {
      const made = document.createElement(tag);
      made.className = className;
      made.append(...children);
      return made;
    };
    const busy = make("span", "busy", "–");
    const bar = make("div", "");
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${name}: nothing computed yet`);
    const lane = { canvas, busy, bar, spans: [], style: null };
    this.#lanes.set(name, lane);
    canvas.addEventListener("pointermove", (event) => this.#point(lane, event.offsetX));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    return make("div", "lane", make("div", "head", make("span", "name", name), busy), canvas, make("div", "meter", bar));
  }

  /** Says what is there. Blocks that move away from under a pointer cannot be read: as long as it stays, they stay. */
  #point(lane, x = 0) {
    if (lane === null || this.#offset === null) {
      this.#held = null;
      this.onpointed("");
      return;
    }
    const end = (this.#held = this.#end());
    const time = end - (1 - x / lane.canvas.clientWidth) * WINDOW_S;
    const found = lane.spans.find((span) => span.begin <= time && time <= span.end);
    this.onpointed(found === undefined ? "Nothing is computed here." : this.#described(found));
  }

  #described({ source, evaluation, split, begin, end }) {
    const kind = this.#sources.length > 1 ? ` of ${this.#sources[source]}` : "";
    return `Step ${evaluation}${kind}, part ${split + 1}: ${((end - begin) * 1000).toFixed(1)} ms`;
  }

  /** The time at the right edge, by the server's clock. */
  #end() {
    const end = performance.now() / 1000 + this.#offset - LATE_S;
    return this.#held !== null && end - this.#held < HELD_S ? this.#held : end;
  }

  #add(told) {
    const offset = told.now - performance.now() / 1000;
    // The least delayed message tells best what the server's clock shows; a clock may drift, though.
    this.#offset = this.#offset === null ? offset : Math.max(offset, this.#offset - 0.0005);
    const steps = new Set();
    for (const [source, evaluation, split, backend, begin, end] of told.spans) {
      this.#lanes.get(backend)?.spans.push({ source, evaluation, split, begin, end });
      steps.add(`${source} ${evaluation}`);
    }
    this.#steps.push([told.now, steps.size]);
    this.#tokens.push([told.now, told.tokens]);
    for (const series of [this.#steps, this.#tokens]) {
      while (series.length && series[0][0] < told.now - WINDOW_S) series.shift();
    }
    this.#figures(told);
  }

  #figures(told) {
    const [since, before] = this.#tokens[0];
    const seconds = told.now - since;
    const rate = (n) => (seconds > 0.5 ? (n / seconds).toFixed(n / seconds < 10 ? 1 : 0) : "–");
    const steps = this.#steps.slice(1).reduce((sum, [, n]) => sum + n, 0);
    this.onfigures({
      writing: `${told.writing} / ${told.rows}`,
      waiting: told.waiting,
      rate: rate(told.tokens - before),
      steps: rate(steps),
    });
    for (const [name, lane] of this.#lanes) {
      const end = told.now;
      const old = end - WINDOW_S - 2 * LATE_S - (this.#held === null ? 0 : HELD_S);
      while (lane.spans.length && lane.spans[0].end < old) lane.spans.shift();
      const share = busyShare(lane.spans, end - LATE_S - 2, end - LATE_S);
      lane.busy.textContent = `busy ${Math.round(share * 100)} %`;
      lane.bar.style.width = `${share * 100}%`;
      lane.canvas.setAttribute("aria-label", `${name}: busy for ${Math.round(share * 100)} % of the last two seconds`);
    }
  }

  #frame(now) {
    // Where motion is unwelcome the picture changes once a second.
    if (this.#offset !== null && (!calm.matches || now - this.#drawn > 1000)) {
      this.#drawn = now;
      const end = this.#end();
      for (const lane of this.#lanes.values()) draw(lane, end);
    }
    requestAnimationFrame((later) => this.#frame(later));
  }
}

function busyShare(spans, begin, end) {
  let busy = 0;
  let until = begin;
  for (const span of [...spans].sort((a, b) => a.begin - b.begin)) {
    const from = Math.max(span.begin, until);
    const to = Math.min(span.end, end);
    if (to > from) {
      busy += to - from;
      until = to;
    }
  }
  return Math.min(1, busy / (end - begin));
}

function draw(lane, end) {
  const { canvas } = lane;
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  if (lane.style === null) {
    const style = getComputedStyle(canvas);
    lane.style = {
      line: style.getPropertyValue("--line"),
      light: style.getPropertyValue("--block-light"),
      strong: style.getPropertyValue("--block-strong"),
    };
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const x = (time) => width - ((end - time) / WINDOW_S) * width;
  pen.fillStyle = lane.style.line;
  for (let second = Math.ceil(end - WINDOW_S); second <= end; second++) pen.fillRect(Math.round(x(second)), 0, 1, height);
  for (const span of lane.spans) {
    const [from, to] = [x(span.begin), x(Math.min(span.end, end))];
    if (to < 0 || from > width || span.begin > end) continue;
    pen.fillStyle = `oklch(${lane.style.light} ${lane.style.strong} ${hue(span.source, span.evaluation)})`;
    pen.beginPath();
    pen.roundRect(from, 6, Math.max(1, to - from - 0.75), height - 12, Math.min(3, (to - from) / 3));
    pen.fill();
  }
}
