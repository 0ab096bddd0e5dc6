/* The event display: its controls, what one chooses in it, and what it tells of that. */

const KINDS = [
  "of a target", "of another particle", "duplicate", "fake", "too short to count",
  "unlabelled: most of its hits have no particle", "of no particle, of a pT that targets do not have",
];

const MANY_FAKES = 300; // so many would hide all else: they wait to be asked for

class EventDisplay extends Painter {
  constructor(root, event) {
    super();
    this.root = root;
    this.facts = event.facts;
    for (const [name, array] of Object.entries(event.arrays)) this[name] = decode(array);
    this.chosenPart = -1;
    this.chosen = null;
    this.finder = (this.facts.finders || [])[0] || null;
    this.colour = "part";
    this.marked = new Set();
    this.shownHit = (hit) => this.layers.hits.on || this.marked.has(hit);
    this.order = this.hitsByPart();
    this.setUpLayers();
    this.controls();
    this.makeViews();
    this.fillLists();
  }

  /* Rows of all hits, part after part, so that each part is painted in one go. */
  hitsByPart() {
    const counts = new Int32Array(this.facts.parts + 1);
    for (const part of this.part) counts[part + 1]++;
    for (let p = 0; p < this.facts.parts; p++) counts[p + 1] += counts[p];
    this.partPtr = counts.slice();
    const rows = new Int32Array(this.part.length);
    for (let i = 0; i < rows.length; i++) rows[counts[this.part[i]]++] = i;
    return rows;
  }

  setUpLayers() {
    const tracks = this.finder !== null, judged = tracks && this[`${this.finder}Kind`] !== undefined;
    const { fakes } = (judged && this.facts[`${this.finder}Counts`]) || { fakes: 0 };
    const layer = (label, colour, on, there, note) => ({ label, colour, on: on && there, there, note });
    this.layers = {
      hits: layer("hits", COLOURS.grey, true, true, "every hit"),
      cut: layer("cut edges", COLOURS.cut, false, this.facts.cutEdges > 0, "candidate edges that join two parts"),
      ghosts: layer("halo nodes of the part", COLOURS.ghost, true, this.facts.parts > 1,
        "hits of other parts that the chosen part needs a copy of"),
      truth: layer("true tracks", COLOURS.truth, !tracks, this.particleRows !== undefined,
        "target particles, hit by hit"),
      found: judged ? layer("found tracks", COLOURS.found, true, true, "tracks that belong to a target particle")
        : layer("tracks", COLOURS.found, tracks, tracks, "tracks; there is no truth to compare them with"),
      others: layer("other tracks", COLOURS.other, false, judged,
        "tracks that belong to another particle, are short, unlabelled, or of a pT that targets do not have"),
      missed: layer("missed", COLOURS.missed, judged, judged, "target particles that no track belongs to"),
      fakes: layer("fakes", COLOURS.fake, judged && fakes < MANY_FAKES, judged, "tracks that belong to no particle, of a pT that targets have"),
    };
  }

  // --- controls

  controls() {
    const bar = this.root.querySelector(".layers");
    for (const [name, layer] of Object.entries(this.layers)) {
      if (!layer.there) continue;
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = layer.colour;
      const button = element("button", {
        type: "button", "aria-pressed": String(layer.on), "data-layer": name, title: layer.note,
      }, swatch, layer.label);
      button.addEventListener("click", () => this.setLayer(name, !layer.on));
      bar.append(button);
    }
    this.select("part", [["-1", "all parts"], ...this.range(this.facts.parts).map((p) => [String(p), `part ${p}`])],
      (value) => this.setPart(Number(value)));
    const colours = [["part", "part"], ["kind", "truth"], ["none", "one colour"]];
    if (this.particleRows === undefined) colours.splice(1, 1);
    this.select("colour", colours, (value) => { this.colour = value; this.redraw(); this.legend(); });
    const finders = (this.facts.finders || []).map((name) => [name, name]);
    if (finders.length > 1) this.select("finder", finders, (value) => this.setFinder(value));
    else this.root.querySelector("[data-control=finder]").parentElement.hidden = true;
    const search = this.root.querySelector("[data-control=search]");
    search.addEventListener("submit", (event) => { event.preventDefault(); this.search(); });
    this.root.querySelector("[data-control=clear]").addEventListener("click", () => {
      this.choose(null);
      for (const view of this.views) view.reset();
    });
    this.legend();
  }

  range(count) {
    return Array.from({ length: count }, (_, i) => i);
  }

  select(name, options, act) {
    const select = this.root.querySelector(`[data-control=${name}]`);
    for (const [value, label] of options) select.append(element("option", { value }, label));
    select.addEventListener("change", () => act(select.value));
  }

  setLayer(name, on) {
    this.layers[name].on = on;
    this.root.querySelector(`[data-layer=${name}]`).setAttribute("aria-pressed", String(on));
    this.redraw();
  }

  setPart(part) {
    this.chosenPart = part;
    this.ghosts = part < 0 ? null : this.ghostsOf(part);
    this.redraw();
    this.legend();
  }

  setFinder(name) {
    this.finder = name;
    this.choose(null);
    this.fillLists();
  }

  /* Hits of other parts that share an edge with this one. */
  ghostsOf(part) {
    const ghosts = new Set();
    for (let i = 0; i < this.cut.length; i += 2) {
      const a = this.cut[i], b = this.cut[i + 1];
      if (this.part[a] === part) ghosts.add(b);
      if (this.part[b] === part) ghosts.add(a);
    }
    return Int32Array.from(ghosts);
  }

  legend() {
    const legend = this.root.querySelector(".legend");
    legend.replaceChildren();
    const add = (colour, text) => {
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = colour;
      legend.append(element("span", {}, swatch, text));
    };
    const count = (part) => this.partPtr[part + 1] - this.partPtr[part];
    if (this.chosenPart >= 0) {
      const sampled = this.facts.cutEdgesDrawn < this.facts.cutEdges ? " at least" : "";
      legend.append(element("span", {}, `part ${this.chosenPart} owns ${count(this.chosenPart).toLocaleString("en")} hits and borrows` +
        `${sampled} ${this.ghosts.length.toLocaleString("en")} halo nodes`));
    } else if (this.colour === "part") {
      const shown = Math.min(this.facts.parts, PARTS.length);
      for (let part = 0; part < shown; part++) add(PARTS[part % PARTS.length], `part ${part}`);
      if (shown < this.facts.parts) legend.append(element("span", {}, `… ${this.facts.parts} parts, colours repeat`));
    } else if (this.colour === "kind") {
      add(COLOURS.truth, "of a target particle");
      add(COLOURS.other, "of another particle");
      add(COLOURS.grey, "noise");
    }
  }

  // --- views

  makeViews() {
    const n = this.x.length;
    const r = new Float32Array(n), phi = new Float32Array(n), eta = new Float32Array(n);
    for (let i = 0; i < n; i++) {
      r[i] = Math.hypot(this.x[i], this.y[i]);
      phi[i] = Math.atan2(this.y[i], this.x[i]);
      eta[i] = Math.asinh(this.z[i] / Math.max(r[i], 1e-6));
    }
    const bounds = (values) => {
      let low = Infinity, high = -Infinity;
      for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
      return low <= high ? [low, high] : [-1, 1];
    };
    const far = Math.max(bounds(r)[1], 1), eta_ = bounds(eta);
    const holder = this.root.querySelector(".views");
    this.views = [
      new View(holder, { name: "x-y", x: this.x, y: this.y, xLabel: "x [mm]", yLabel: "y [mm]", square: true,
        range: () => [-far, far, -far, far] }, this),
      new View(holder, { name: "r-z", x: this.z, y: r, xLabel: "z [mm]", yLabel: "r [mm]",
        range: () => [...bounds(this.z), 0, far] }, this),
      new View(holder, { name: "phi-eta", x: phi, y: eta, xLabel: "φ [rad]", yLabel: "η", wraps: true,
        range: () => [-Math.PI, Math.PI, ...eta_] }, this),
    ];
    this.views[2].holder.hidden = true;
    for (const button of this.root.querySelectorAll("[data-view]")) {
      button.addEventListener("click", () => this.showView(Number(button.dataset.view), button));
    }
  }

  showView(number, button) {
    const holder = this.views[number].holder;
    holder.hidden = !holder.hidden;
    button.setAttribute("aria-pressed", String(!holder.hidden));
  }

  redraw() {
    for (const view of this.views || []) if (!view.holder.hidden) view.redraw();
  }

  // --- choosing

  chosenHits() {
    const { particle, track, hit } = this.chosen;
    const all = new Set(hit >= 0 ? [hit] : []);
    for (const [name, path] of [["particle", particle], [this.finder, track]]) {
      if (!(path >= 0)) continue;
      const ptr = this[`${name}Ptr`];
      for (const row of this[`${name}Rows`].subarray(ptr[path], ptr[path + 1])) all.add(row);
    }
    return all;
  }

  /* What to highlight: a hit with its particle and track, a particle, or a track; null for nothing. */
  choose(what, zoom = false) {
    this.chosen = what === null ? null : { hit: -1, particle: -1, track: -1, ...what };
    if (what !== null && what.hit >= 0) {
      if (this.particle) this.chosen.particle = this.particle[what.hit];
      if (this.finder !== null) this.chosen.track = this[`${this.finder}Track`][what.hit];
    }
    this.marked = what === null ? new Set() : this.chosenHits();
    this.root.querySelector(".chosen").textContent = what === null ? "" : this.describeChosen();
    if (zoom && what !== null) this.zoomTo(this.marked);
    this.redraw();
  }

  zoomTo(hits) {
    for (const view of this.views) {
      let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
      for (const hit of hits) {
        x0 = Math.min(x0, view.x[hit]); x1 = Math.max(x1, view.x[hit]);
        y0 = Math.min(y0, view.y[hit]); y1 = Math.max(y1, view.y[hit]);
      }
      const all = view.range(), least = (all[1] - all[0]) / 60;
      if (x0 <= x1) view.show([x0 - least, x1 + least, y0 - least, y1 + least]);
    }
  }

  search() {
    const word = this.root.querySelector("[data-control=word]").value.trim();
    const where = this.root.querySelector("[data-control=where]").value;
    let what = null;
    if (where === "particle") {
      const row = (this.facts.particleIds || []).indexOf(word);
      if (row >= 0) what = { particle: row, track: this.finder ? this[`${this.finder}BestTrack`][row] : -1 };
    } else if (where === "track" && this.finder !== null && /^\d+$/.test(word)) {
      if (Number(word) < this[`${this.finder}Ptr`].length - 1) what = this.trackChoice(Number(word));
    } else if (where === "hit") {
      const row = this.hitId.indexOf(Number(word));
      if (row >= 0 && word !== "") what = { hit: row };
    }
    this.choose(what, true);
    if (what === null) this.root.querySelector(".chosen").textContent = `no ${where} ${word} in this event`;
  }

  trackChoice(track) {
    return { track, particle: this[`${this.finder}Particle`][track] };
  }

  // --- words

  particleWords(row) {
    const pt = this.particlePt[row], eta = this.particleEta[row];
    const facts = [`particle ${this.facts.particleIds[row]}${this.particleTarget[row] ? " (target)" : ""}`];
    if (pt === pt) facts.push(`pT ${pt.toPrecision(3)} GeV`);
    if (eta === eta) facts.push(`η ${eta.toFixed(2)}`);
    facts.push(`${this.hitsOnPath("particle", row)} hits`);
    return facts.join(", ");
  }

  trackWords(name, track) {
    const kind = this[`${name}Kind`];
    const size = this.hitsOnPath(name, track), shared = this[`${name}Shared`];
    const whose = kind ? `, ${shared[track]} of one particle (${KINDS[kind[track]]})` : "";
    return `${name} track ${track}: ${size} hits${whose}`;
  }

  describe(hit) {
    const lines = [`hit ${this.hitId[hit]}, ${this.facts.layers[this.layer[hit]]}, part ${this.part[hit]}`,
      `x ${this.x[hit].toFixed(1)}  y ${this.y[hit].toFixed(1)}  z ${this.z[hit].toFixed(1)} mm`];
    if (this.particle) lines.push(this.particle[hit] < 0 ? "noise" : this.particleWords(this.particle[hit]));
    for (const name of this.facts.finders || []) {
      const track = this[`${name}Track`][hit];
      lines.push(track < 0 ? `on no ${name} track` : this.trackWords(name, track));
    }
    return lines.join("\n");
  }

  describeChosen() {
    const { particle, track, hit } = this.chosen, words = [];
    if (hit >= 0) words.push(`hit ${this.hitId[hit]}`);
    if (particle >= 0) words.push(`black line: ${this.particleWords(particle)}`);
    if (track >= 0) words.push(`dashed: ${this.trackWords(this.finder, track)}`);
    return words.join(" · ");
  }

  // --- lists of the worst

  fillLists() {
    const lists = this.root.querySelector(".lists");
    lists.replaceChildren();
    if (this.particleRows === undefined) return;
    if (this.finder === null) {
      const targets = this.range(this.facts.particleIds.length).filter((p) => this.particleTarget[p]);
      this.list(lists, "Target particles, highest pT", this.highest(targets), (p) => this.rowOfParticle(p));
      return;
    }
    const found = this[`${this.finder}Found`], kind = this[`${this.finder}Kind`];
    if (kind === undefined) return;
    const missed = this.range(found.length).filter((p) => this.isMissed(p, found));
    const fakes = this.range(kind.length).filter((t) => kind[t] === FAKE);
    fakes.sort((a, b) => this.hitsOnPath(this.finder, b) - this.hitsOnPath(this.finder, a));
    this.list(lists, "Missed targets, highest pT", this.highest(missed), (p) => this.rowOfParticle(p));
    this.list(lists, "Fakes, longest", fakes, (t) => [
      `track ${t}`, `${this.hitsOnPath(this.finder, t)} hits`,
      `at most ${this[`${this.finder}Shared`][t]} of one particle`, this.trackChoice(t),
    ]);
  }

  highest(particles) {
    const pt = (p) => (this.particlePt[p] === this.particlePt[p] ? this.particlePt[p] : -1);
    return particles.sort((a, b) => pt(b) - pt(a));
  }

  rowOfParticle(particle) {
    const pt = this.particlePt[particle];
    const size = this.hitsOnPath("particle", particle);
    const track = this.finder === null ? -1 : this[`${this.finder}BestTrack`][particle];
    const held = track < 0 ? "" : `, best track holds ${this[`${this.finder}BestShared`][particle]}`;
    const lost = this.finder === null ? [] : [this.facts.reasons[this[`${this.finder}Lost`][particle]]];
    const parts = new Set();
    const ptr = this.particlePtr;
    for (const row of this.particleRows.subarray(ptr[particle], ptr[particle + 1])) parts.add(this.part[row]);
    return [pt === pt ? `${pt.toPrecision(3)} GeV` : "pT unknown", `${size} hits${held}`,
      parts.size > 1 ? `in ${parts.size} parts` : "in 1 part", ...lost, { particle, track }];
  }

  list(holder, title, items, row) {
    const body = element("tbody");
    for (const item of items.slice(0, 40)) {
      const [first, ...rest] = row(item), what = rest.pop();
      const button = element("button", { type: "button" }, first);
      button.addEventListener("click", () => this.choose(what, true));
      body.append(element("tr", {}, element("td", {}, button), ...rest.map((text) => element("td", {}, text))));
    }
    const more = items.length > 40 ? `, the first 40 of ${items.length.toLocaleString("en")}` : ` (${items.length})`;
    holder.append(element("div", { class: "list" }, element("h4", {}, `${title}${more}`),
      items.length ? element("div", { class: "scroll" }, element("table", {}, body)) : element("p", {}, "none")));
  }
}
