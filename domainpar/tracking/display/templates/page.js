/* The buttons that choose between charts, the contents, and what the event display is made of.
   No network, no storage. What comes from a run is written with textContent, never as HTML. */

const read = (id) => {
  const element = document.getElementById(id);
  return element === null ? null : JSON.parse(element.textContent);
};

/* Buttons that choose the charts of one variant in their section. */
function setUpSwitch(bar) {
  const buttons = [...bar.querySelectorAll("button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      for (const chart of bar.parentElement.querySelectorAll("[data-variant]")) {
        chart.hidden = chart.dataset.variant !== button.value;
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
  for (const bar of document.querySelectorAll(".switch")) setUpSwitch(bar);
  setUpContents();
  const root = document.getElementById("event-display");
  const display = root === null ? null : new EventDisplay(root, read("event-data"));
  window.domainpar = { display };
}

document.addEventListener("DOMContentLoaded", begin);
