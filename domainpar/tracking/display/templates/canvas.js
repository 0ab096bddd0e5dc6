/* A canvas with axes, and what the pointer does on it. */

// --- one view of the event -----------------------------------------------------------------------------------------

const MARGIN = { left: 62, right: 12, top: 12, bottom: 44 };
const REACH = 9; // pixels around the pointer in which a hit is looked for

/* A canvas with axes: pans when dragged, zooms with the wheel once it was clicked. */
class View {
  constructor(holder, options, display) {
    Object.assign(this, options);
    this.display = display;
    this.canvas = element("canvas", { tabindex: "0", "aria-label": `event display, ${options.name}` });
    this.tip = element("div", { class: "tip", hidden: "" });
    const zoomIn = element("button", { type: "button", title: "zoom in" }, "+");
    const zoomOut = element("button", { type: "button", title: "zoom out" }, "−");
    const reset = element("button", { type: "button", title: "show everything" }, "⤢");
    this.holder = element("div", { class: "view" }, this.canvas, this.tip,
      element("div", { class: "zoom" }, zoomIn, zoomOut, reset));
    holder.append(this.holder);
    zoomIn.addEventListener("click", () => this.zoom(1.6, this.width / 2, this.height / 2));
    zoomOut.addEventListener("click", () => this.zoom(1 / 1.6, this.width / 2, this.height / 2));
    reset.addEventListener("click", () => this.reset());
    this.context = this.canvas.getContext("2d");
    this.listen();
    new ResizeObserver(() => this.resize()).observe(this.holder);
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => {
      if (document.activeElement !== canvas && !event.ctrlKey) return; // else the page could not be scrolled past
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 400), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.focus({ preventScroll: true });
      canvas.setPointerCapture(event.pointerId);
      this.grabbed = { x: event.offsetX, y: event.offsetY, moved: false };
    });
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => {
      if (this.grabbed && !this.grabbed.moved) this.pick(event.offsetX, event.offsetY);
      this.grabbed = null;
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const step = 40;
    const moves = { ArrowLeft: [step, 0], ArrowRight: [-step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
    if (event.key === "+" || event.key === "=") this.zoom(1.4, this.width / 2, this.height / 2);
    else if (event.key === "-") this.zoom(1 / 1.4, this.width / 2, this.height / 2);
    else if (event.key === "0") this.reset();
    else if (event.key in moves) this.pan(...moves[event.key]);
    else return;
    event.preventDefault();
  }

  move(event) {
    if (this.grabbed) {
      const dx = event.offsetX - this.grabbed.x, dy = event.offsetY - this.grabbed.y;
      if (!this.grabbed.moved && Math.hypot(dx, dy) < 4) return;
      this.grabbed = { x: event.offsetX, y: event.offsetY, moved: true };
      this.tip.hidden = true;
      this.pan(dx, dy);
    } else {
      this.hover(event.offsetX, event.offsetY);
    }
  }

  resize() {
    const box = this.holder.getBoundingClientRect();
    if (box.width === 0) return;
    const ratio = window.devicePixelRatio || 1;
    const before = this.moved ? this.inner : null;
    const middle = before && this.toData(MARGIN.left + before.width / 2, MARGIN.top + before.height / 2);
    this.width = box.width;
    this.height = box.height;
    this.canvas.width = Math.round(box.width * ratio);
    this.canvas.height = Math.round(box.height * ratio);
    this.ratio = ratio;
    if (before) this.centre(middle, this.scale);
    else this.reset();
  }

  get inner() {
    return { width: this.width - MARGIN.left - MARGIN.right, height: this.height - MARGIN.top - MARGIN.bottom };
  }

  reset() {
    this.show(this.range(), 1.03);
    this.moved = false;
  }

  /* Show a box of the plane, [x0, x1, y0, y1]. */
  show([x0, x1, y0, y1], margin = 1.2) {
    const { width, height } = this.inner;
    const scale = [width / (margin * Math.max(x1 - x0, 1e-9)), height / (margin * Math.max(y1 - y0, 1e-9))];
    if (this.square) scale[0] = scale[1] = Math.min(...scale);
    this.moved = true;
    this.centre([(x0 + x1) / 2, (y0 + y1) / 2], scale);
  }

  centre([x, y], scale) {
    const { width, height } = this.inner;
    this.scale = scale;
    this.offset = [MARGIN.left + width / 2 - x * scale[0], MARGIN.top + height / 2 + y * scale[1]];
    this.redraw();
  }

  /* While the view moves it is painted coarsely, and finely a moment later. */
  startMoving() {
    this.moving = this.moved = true;
    clearTimeout(this.resting);
    this.resting = setTimeout(() => { this.moving = false; this.redraw(); }, 160);
  }

  pan(dx, dy) {
    this.startMoving();
    this.offset = [this.offset[0] + dx, this.offset[1] + dy];
    this.redraw();
  }

  zoom(factor, px, py) {
    const [x, y] = this.toData(px, py);
    this.startMoving();
    this.scale = this.scale.map((one) => one * factor);
    this.offset = [px - x * this.scale[0], py + y * this.scale[1]];
    this.redraw();
  }

  toData(px, py) {
    return [(px - this.offset[0]) / this.scale[0], (this.offset[1] - py) / this.scale[1]];
  }

  redraw() {
    if (this.waiting || this.width === undefined) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  draw() {
    const c = this.context;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = "#ffffff";
    c.fillRect(0, 0, this.width, this.height);
    const { width, height } = this.inner;
    c.save();
    c.beginPath();
    c.rect(MARGIN.left, MARGIN.top, width, height);
    c.clip();
    this.display.paint(this);
    c.restore();
    this.axes();
  }

  axes() {
    const c = this.context, { width, height } = this.inner;
    const bottom = MARGIN.top + height;
    c.strokeStyle = "#8a94a0";
    c.lineWidth = 1;
    c.strokeRect(MARGIN.left + 0.5, MARGIN.top + 0.5, width - 1, height - 1);
    c.fillStyle = "#39424e";
    c.font = "12px system-ui, sans-serif";
    const [x0, y1] = this.toData(MARGIN.left, MARGIN.top), [x1, y0] = this.toData(MARGIN.left + width, bottom);
    c.textAlign = "center";
    c.textBaseline = "top";
    for (const [value, text] of ticks(x0, x1, width / 90)) {
      const px = this.offset[0] + value * this.scale[0];
      c.fillRect(px, bottom, 1, 5);
      c.fillText(text, px, bottom + 7);
    }
    c.fillText(this.xLabel, MARGIN.left + width / 2, bottom + 25);
    c.textAlign = "right";
    c.textBaseline = "middle";
    for (const [value, text] of ticks(y0, y1, height / 60)) {
      const py = this.offset[1] - value * this.scale[1];
      c.fillRect(MARGIN.left - 5, py, 5, 1);
      c.fillText(text, MARGIN.left - 8, py);
    }
    c.save();
    c.translate(13, MARGIN.top + height / 2);
    c.rotate(-Math.PI / 2);
    c.textAlign = "center";
    c.fillText(this.yLabel, 0, 0);
    c.restore();
  }

  /* The hit nearest to a point of the canvas among those that are shown; -1 if none is near. */
  nearest(px, py) {
    const { x, y } = this, { shownHit: shown, marked } = this.display;
    const [ox, oy] = this.offset, [sx, sy] = this.scale;
    let best = -1, least = REACH * REACH;
    for (let i = 0; i < x.length; i++) {
      const dx = ox + x[i] * sx - px;
      if (dx > REACH || dx < -REACH) continue;
      const dy = oy - y[i] * sy - py;
      // What is chosen lies on top, so it is what one points at.
      const distance = (dx * dx + dy * dy) * (marked.has(i) ? 0.05 : 1);
      if (distance < least && shown(i)) { least = distance; best = i; }
    }
    return best;
  }

  inside(px, py) {
    const { width, height } = this.inner;
    return px >= MARGIN.left && py >= MARGIN.top && px <= MARGIN.left + width && py <= MARGIN.top + height;
  }

  hover(px, py) {
    const hit = this.inside(px, py) ? this.nearest(px, py) : -1;
    this.tip.hidden = hit < 0;
    if (hit < 0) return;
    this.tip.textContent = this.display.describe(hit);
    const left = px + 16 + this.tip.offsetWidth > this.width ? px - 16 - this.tip.offsetWidth : px + 16;
    const top = Math.min(py + 12, this.height - this.tip.offsetHeight - 4);
    this.tip.style.transform = `translate(${Math.max(left, 2)}px, ${Math.max(top, 2)}px)`;
  }

  pick(px, py) {
    const hit = this.inside(px, py) ? this.nearest(px, py) : -1;
    this.display.choose(hit < 0 ? null : { hit });
  }
}

function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(wanted, 2);
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) {
    found.push([k * step, (k * step).toFixed(digits).replace("-", "−").replace(/^−(0(\.0*)?)$/, "$1")]);
  }
  return found;
}
