/* Figures that are drawn when they come into view, the buttons that choose between them, and the contents.
   No network, no storage. What comes from a run is written with textContent, never as HTML. */

const read = (id) => {
  const element = document.getElementById(id);
  return element === null ? null : JSON.parse(element.textContent);
};

// --- figures -------------------------------------------------------------------------------------------------------

/* A figure holds one plot for each of its variants: {name: {data, layout}}. */
const figures = new Map();
// The report talks to nobody: plotly.js would offer to send a figure to its makers' server.
const plotly = {
  responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
  modeBarButtons: [["toImage", "resetScale2d"]],
};

function drawFigure(id) {
  const figure = figures.get(id);
  const plot = figure.variants[figure.shown];
  Plotly.react(figure.div, plot.data, plot.layout, plotly);
  figure.drawn = true;
}

function setUpFigures() {
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !figures.get(entry.target.id).drawn) drawFigure(entry.target.id);
    }
  }, { rootMargin: "600px" });
  for (const div of document.querySelectorAll(".figure")) {
    const variants = read(`${div.id}-data`);
    figures.set(div.id, { div, variants, shown: Object.keys(variants)[0], drawn: false });
    watcher.observe(div);
  }
  for (const bar of document.querySelectorAll("[data-switches]")) setUpSwitch(bar);
  window.addEventListener("beforeprint", drawAll);
}

function drawAll() {
  for (const [id, figure] of figures) if (!figure.drawn) drawFigure(id);
}

/* Buttons that choose a variant of one or more figures. */
function setUpSwitch(bar) {
  const buttons = [...bar.querySelectorAll("button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      for (const id of bar.dataset.switches.split(" ")) {
        const figure = figures.get(id);
        if (figure === undefined || !(button.value in figure.variants)) continue;
        figure.shown = button.value;
        if (figure.drawn) drawFigure(id);
      }
    });
  }
}

// --- arrays --------------------------------------------------------------------------------------------------------

const TYPES = { f8: Float64Array, f4: Float32Array, i4: Int32Array, u2: Uint16Array, u1: Uint8Array };

function decode(array) {
  const text = atob(array.data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new TYPES[array.type](bytes.buffer);
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// --- contents ------------------------------------------------------------------------------------------------------

function setUpContents() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const mark = () => {
    let current = null;
    for (const section of document.querySelectorAll("main section")) {
      if (section.getBoundingClientRect().top < 140) current = section.id;
    }
    for (const [id, link] of links) link.classList.toggle("current", id === current);
  };
  document.addEventListener("scroll", mark, { passive: true });
  mark();
}

function begin() {
  setUpFigures();
  setUpContents();
  const root = document.getElementById("event-display");
  const display = root === null ? null : new EventDisplay(root, read("event-data"));
  window.domainpar = { figures, drawAll, display };
}

document.addEventListener("DOMContentLoaded", begin);
