// Puts the page together: the conversation, the lanes, who else asks, the theme.

import { modelName } from "./api.js";
import { Chat } from "./chat.js";
import { Crowd } from "./crowd.js";
import { Lanes } from "./lanes.js";

const at = (id) => document.getElementById(id);

const root = document.documentElement;
const chosen = localStorage.getItem("theme");
if (chosen) root.dataset.theme = chosen;
at("theme").addEventListener("click", () => {
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  lanes.restyle();
});

const lanes = new Lanes(at("lanes"));
lanes.onfigures = (figures) => {
  for (const [id, value] of Object.entries(figures)) at(id).textContent = value;
};
const legend = at("legend").textContent;
lanes.onpointed = (what) => {
  at("legend").textContent = what || legend;
};
lanes.onconnection = (there) => {
  at("connection").textContent = there ? "connected" : "no connection";
  at("connection").className = `pill ${there ? "good" : "bad"}`;
};
lanes.watch(new URL("live", location.href));

let model = null;
const ask = async () => {
  if (model === null) {
    model = await modelName();
    at("model").textContent = model;
  }
  return model;
};
ask().catch(() => {});

new Chat(document, ask);
new Crowd(at("others"), at("others-shown"), at("others-told"), ask);
