// The page asks for itself again and takes over what differs, node by node: focus, selection, open details, scroll
// positions and hidden curves stay. Nodes with data-key are matched by it; those with data-own are left alone.
"use strict";

const KEPT = { DETAILS: ["open"] };
const key = (node) => (node.nodeType === 1 ? node.getAttribute("data-key") : null);
const matches = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && key(a) === key(b);

function morph(old, now) {
  if (old.nodeType !== 1) {
    if (old.nodeValue !== now.nodeValue) old.nodeValue = now.nodeValue;
    return;
  }
  if (old.hasAttribute("data-own")) return;
  const kept = KEPT[old.nodeName] ?? [];
  for (const { name, value } of now.attributes)
    if (!kept.includes(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes])
    if (!kept.includes(name) && !now.hasAttribute(name)) old.removeAttribute(name);
  const keyed = new Map([...old.children].filter(key).map((child) => [key(child), child]));
  let here = old.firstChild;
  for (const next of [...now.childNodes]) {
    const named = keyed.get(key(next));
    if (named && named !== here) old.insertBefore(named, here);
    const match = named ?? here;
    if (match && matches(match, next)) {
      morph(match, next);
      here = match.nextSibling;
    } else {
      old.insertBefore(document.importNode(next, true), here);
    }
  }
  while (here) {
    const gone = here;
    here = here.nextSibling;
    gone.remove();
  }
}

// ---- curves -----------------------------------------------------------------------------------------------------

const hidden = new Set();
let lit = null;
let at = null; // where the reader points, 0 to 1
const curves = () => [...document.querySelectorAll("#plot .curve")];

function applyChoices() {
  document.getElementById("plot")?.classList.toggle("faded", lit !== null);
  for (const curve of curves()) {
    curve.classList.toggle("off", hidden.has(curve.dataset.key));
    curve.classList.toggle("lit", curve.dataset.key === lit);
  }
  for (const button of document.querySelectorAll("[data-curve]"))
    button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.curve)));
}

function drawn(name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) node.setAttribute(attribute, value);
  return node;
}

// The nearest point of every curve that is shown, read out below the figure.
function readOut() {
  const cursor = document.getElementById("cursor");
  const readout = document.getElementById("readout");
  if (!cursor || !readout) return;
  const marks = [];
  const said = [];
  const lines = curves().filter((curve) => !hidden.has(curve.dataset.key));
  if (at !== null && lines.length) {
    const away = (point) => Math.abs(point[2] - at);
    const near = lines.map((line) => JSON.parse(line.dataset.points).reduce((a, b) => (away(b) < away(a) ? b : a)));
    const first = near.reduce((a, b) => (away(b) < away(a) ? b : a));
    const x = 1000 * first[2];
    marks.push(drawn("line", { class: "line", x1: x, x2: x, y1: 0, y2: 1000 }));
    said.push(["b", `step ${first[0].toLocaleString("en")}`]);
    near.forEach(([, value, across, down], i) => {
      if (Math.abs(across - first[2]) > 0.05) return; // a curve that is not here yet, or no longer
      const colour = [...lines[i].classList].find((name) => /^c\d$/.test(name));
      marks.push(drawn("path", { class: `dot ${colour}`, d: `M${1000 * across} ${1000 * down}h0.01` }));
      said.push(["span", `${lines[i].dataset.label}: ${value}`]);
    });
  }
  cursor.replaceChildren(...marks);
  if (said.map(([, text]) => text).join("") === readout.textContent) return; // nothing new to be read aloud
  readout.replaceChildren(...said.map(([name, text]) => Object.assign(document.createElement(name), { textContent: text })));
}

document.addEventListener("pointermove", (event) => {
  const area = event.target.closest?.(".area");
  if (!area) return;
  const box = area.getBoundingClientRect();
  at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  readOut();
});
document.addEventListener("keydown", (event) => {
  if (event.target.id !== "plot" || !["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) return;
  const step = event.key === "ArrowRight" ? 0.02 : -0.02;
  at = event.key === "Escape" ? null : Math.min(1, Math.max(0, (at ?? (step > 0 ? -0.02 : 1.02)) + step));
  readOut();
  event.preventDefault();
});
document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-curve]");
  if (!button) return;
  const trial = button.dataset.curve;
  if (!hidden.delete(trial)) hidden.add(trial);
  applyChoices();
  readOut();
});
for (const [begin, end] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
  document.addEventListener(begin, (event) => {
    lit = event.target.closest?.("[data-curve]")?.dataset.curve ?? null;
    applyChoices();
  });
  document.addEventListener(end, () => {
    lit = null;
    applyChoices();
  });
}

// ---- following --------------------------------------------------------------------------------------------------

const pause = document.getElementById("pause");
const away = document.getElementById("away");
let paused = false;
let tag = null;

function told(text) {
  away.hidden = !text;
  if (away.textContent !== text) away.textContent = text;
}

async function refresh() {
  const headers = tag ? { "If-None-Match": tag } : {};
  const answer = await fetch(location.href, { headers, cache: "no-store" });
  if (answer.status === 304) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (!answer.ok) throw new Error(page.querySelector(".banner:not(#away)")?.textContent ?? `error ${answer.status}`);
  tag = answer.headers.get("ETag");
  document.title = page.title;
  morph(document.getElementById("main"), page.getElementById("main"));
  applyChoices();
  if (at !== null) readOut();
}

let timer = null;
let asking = false;

async function follow() {
  const main = document.getElementById("main");
  if (asking || main.dataset.next === "0") return; // 0: a page that is not there
  asking = true;
  clearTimeout(timer);
  if (!paused && !document.hidden) {
    try {
      await refresh();
      document.getElementById("updated").textContent = `Updated ${new Date().toLocaleTimeString("en-GB")}`;
      told("");
    } catch (error) {
      told(error instanceof TypeError ? "The dashboard does not answer: was it ended? Trying again." : error.message);
    }
  }
  asking = false;
  timer = setTimeout(follow, Number(main.dataset.next) || 2000);
}

pause.hidden = false;
pause.addEventListener("click", () => {
  paused = !paused;
  pause.textContent = paused ? "Go on" : "Pause";
  if (paused) document.getElementById("updated").textContent = "Paused";
  else follow();
});
document.addEventListener("visibilitychange", follow); // back on screen: at once
applyChoices();
follow();
