/* How an event is painted on the canvas of a view: hits, ghosts, cut edges, and lines along particles and tracks. */

// Tol's light colours for parts, Okabe and Ito's strong ones for lines: colour-blind readers tell them apart.
// Parts beyond the list repeat it.
const PARTS = ["#77aadd", "#ee8866", "#44bb99", "#ccbb44", "#ffaabb", "#66ccee", "#aaaa00", "#bb99cc"];
const COLOURS = {
  grey: "#b4bcc6", ghost: "#000000", cut: "#7a4b00", truth: "#0072b2", other: "#56b4e9", found: "#00795a",
  missed: "#d55e00", fake: "#882255", chosen: "#000000",
};
const MANY_LINES = 30000;
const FEW = 4000;
const FAKE = 3;

class Painter {
  /* What matters lies on top: lines of what went well below the hits, of what went wrong above them. */
  paint(view) {
    const { layers, finder } = this;
    const kind = finder === null ? undefined : this[`${finder}Kind`];
    if (layers.cut.on) this.paintCut(view);
    if (layers.others.on) this.paintPaths(view, finder, (t) => kind[t] !== FAKE && !this.isOfTarget(t), COLOURS.other, 0.4);
    if (layers.truth.on) this.paintPaths(view, "particle", (p) => this.particleTarget[p], COLOURS.truth, 0.4);
    if (layers.found.on) this.paintPaths(view, finder, (t) => this.isOfTarget(t), COLOURS.found, 0.5);
    if (layers.hits.on) this.paintHits(view);
    if (layers.ghosts.on && this.chosenPart >= 0) this.paintGhosts(view);
    if (layers.fakes.on) this.paintPaths(view, finder, (t) => kind[t] === FAKE, COLOURS.fake, 0.6);
    if (layers.missed.on) {
      const found = this[`${finder}Found`];
      this.paintPaths(view, "particle", (p) => this.isMissed(p, found), COLOURS.missed, 0.9);
    }
    if (this.chosen) this.paintChosen(view);
    view.context.globalAlpha = 1;
  }

  /* Whether a track belongs to a target; without truth all of them are just tracks. */
  isOfTarget(track) {
    const kind = this[`${this.finder}Kind`];
    if (kind === undefined) return true;
    const particle = this[`${this.finder}Particle`][track];
    return kind[track] < FAKE && particle >= 0 && this.particleTarget[particle] === 1;
  }

  hitsOnPath(name, path) {
    return this[`${name}Ptr`][path + 1] - this[`${name}Ptr`][path];
  }

  isMissed(particle, found) {
    return this.particleTarget[particle] && !found[particle];
  }

  /* Larger dots when few hits are in view. */
  dotSize(view) {
    const everything = view.range(), { width } = view.inner;
    const zoom = view.scale[0] * (everything[1] - everything[0]) / width;
    const base = this.x.length > 40000 ? 1.2 : 1.8;
    return Math.min(5, base * Math.sqrt(Math.max(zoom, 1)));
  }

  paintHits(view) {
    const size = this.dotSize(view), faint = this.chosenPart >= 0;
    for (let part = 0; part < this.facts.parts; part++) {
      const other = faint && part !== this.chosenPart;
      view.context.globalAlpha = other ? 0.35 : 0.85;
      const rows = this.order.subarray(this.partPtr[part], this.partPtr[part + 1]);
      if (this.colour === "kind" && !other) this.paintByKind(view, rows, size);
      else this.dots(view, rows, other || this.colour === "none" ? COLOURS.grey : PARTS[part % PARTS.length], size);
    }
  }

  paintByKind(view, rows, size) {
    const of = (hit) => (this.particle[hit] < 0 ? 0 : this.particleTarget[this.particle[hit]] ? 2 : 1);
    [COLOURS.grey, COLOURS.other, COLOURS.truth].forEach((colour, kind) => {
      this.dots(view, rows.filter((hit) => of(hit) === kind), colour, size);
    });
  }

  dots(view, rows, colour, size) {
    const c = view.context, { x, y } = view, [ox, oy] = view.offset, [sx, sy] = view.scale;
    const { width, height } = view, half = size / 2;
    const step = view.moving && rows.length > FEW ? 5 : 1; // a hand wants to see that it moves, not every hit
    c.fillStyle = colour;
    for (let k = 0; k < rows.length; k += step) {
      const px = ox + x[rows[k]] * sx, py = oy - y[rows[k]] * sy;
      if (px > 0 && py > 0 && px < width && py < height) c.fillRect(px - half, py - half, size, size);
    }
  }

  paintGhosts(view) {
    view.context.globalAlpha = 1;
    this.dots(view, this.ghosts, COLOURS.ghost, this.dotSize(view) + 1.2);
  }

  paintCut(view) {
    if (view.moving && this.cut.length > FEW) return;
    const c = view.context, part = this.chosenPart;
    c.globalAlpha = part < 0 && this.cut.length > MANY_LINES ? 0.12 : 0.35;
    c.strokeStyle = COLOURS.cut;
    c.lineWidth = 0.6;
    c.beginPath();
    for (let i = 0; i < this.cut.length; i += 2) {
      const a = this.cut[i], b = this.cut[i + 1];
      if (part < 0 || this.part[a] === part || this.part[b] === part) this.line(view, c, a, b);
    }
    c.stroke();
  }

  line(view, c, a, b) {
    const { x, y } = view, [ox, oy] = view.offset, [sx, sy] = view.scale;
    if (view.wraps && Math.abs(x[a] - x[b]) > Math.PI) return;
    c.moveTo(ox + x[a] * sx, oy - y[a] * sy);
    c.lineTo(ox + x[b] * sx, oy - y[b] * sy);
  }

  /* Lines along the hits of each path that is wanted; `name` says whose paths. */
  paintPaths(view, name, wanted, colour, alpha, width = 0.8) {
    const c = view.context, rows = this[`${name}Rows`], ptr = this[`${name}Ptr`];
    c.globalAlpha = alpha;
    c.strokeStyle = colour;
    c.lineWidth = width;
    c.beginPath();
    const step = view.moving && ptr.length > FEW ? 5 : 1;
    for (let p = 0; p + 1 < ptr.length; p += step) {
      if (!wanted(p)) continue;
      for (let k = ptr[p] + 1; k < ptr[p + 1]; k++) this.line(view, c, rows[k - 1], rows[k]);
    }
    c.stroke();
  }

  paintChosen(view) {
    const c = view.context, { particle, track } = this.chosen;
    c.globalAlpha = 1;
    if (particle >= 0) this.paintPaths(view, "particle", (p) => p === particle, COLOURS.chosen, 1, 2.2);
    if (track >= 0) {
      c.setLineDash([7, 5]);
      this.paintPaths(view, this.finder, (t) => t === track, COLOURS.fake, 1, 2.2);
      c.setLineDash([]);
    }
    const hits = Int32Array.from(this.marked);
    this.dots(view, hits, COLOURS.chosen, 6);
    this.dots(view, hits, "#ffffff", 3);
  }
}
