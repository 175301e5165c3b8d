"use strict";
// Interactive attention maps. Every element of class "amap" holds its data as JSON: see maps.py.
(() => {
  const el = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  const shown = (token) => token.replace(/\n/g, "⏎").trim() || "·";

  class Panel {
    constructor(view, model) {
      this.view = view;
      this.model = model;
      this.root = el("article", "panel");
      this.root.append(el("h4", "", model.name));
      this.querySide = el("div", "side");
      this.queries = el("div", "tokens queries");
      this.facts = el("p", "facts");
      this.facts.setAttribute("aria-live", "polite");
      this.keySide = el("div", "side");
      this.keys = el("div", "tokens keys");
      this.canvas = el("canvas");
      this.canvas.setAttribute("role", "img");
      this.root.append(this.querySide, this.queries, this.facts, this.keySide, this.keys,
        el("div", "side", "whole map: rows are queries, columns are keys"), this.canvas);
      this.queries.setAttribute("role", "toolbar");
      this.queries.setAttribute("aria-label", `queries of ${model.name}`);
      this.queries.addEventListener("keydown", (event) => this.onKey(event));
      this.canvas.addEventListener("mousemove", (event) => {
        const box = this.canvas.getBoundingClientRect();
        view.choose(Math.floor((event.clientY - box.top) / box.height * this.rows), this);
      });
    }

    // Weights of one site as Int16 [layers, heads, rows, columns] with one scale for each map.
    load(textIndex, site) {
      const text = this.model.texts[textIndex], data = text.sites[site];
      this.data = data;
      this.weights = new Int16Array(bytes(data.weights));
      [this.layers, this.heads, this.rows, this.columns] = data.shape;
      // A decoder's row reads in order to predict a token: the rows may be named after it.
      this.rowTokens = site === "encoder" ? text.source : text.predicted || text.target;
      this.columnTokens = site === "decoder" ? text.target : text.source;
      this.causal = site === "decoder";
      this.querySide.textContent = `reads (${site === "encoder" ? "source" : "target"} tokens): ` +
        "hover, or focus and use the arrow keys";
      this.keySide.textContent = "is read: a stronger colour is more weight, struck out is exactly zero";
      this.queries.replaceChildren(...this.rowTokens.map((token, row) => {
        const button = el("button", "token", shown(token));
        button.type = "button";
        button.tabIndex = -1;
        button.addEventListener("mouseenter", () => this.view.choose(row, this));
        button.addEventListener("focus", () => this.view.choose(row, this));
        return button;
      }));
      this.keys.replaceChildren(...this.columnTokens.map((token) => el("span", "token", shown(token))));
    }

    row(layer, head, row) {
      const at = ((layer * this.heads + head) * this.rows + row) * this.columns;
      const scale = this.data.scales[layer][head] / 32767;
      return Array.from(this.weights.subarray(at, at + this.columns), (value) => value * scale);
    }

    draw(layer, head) {
      this.layer = Math.min(layer, this.layers - 1);
      this.head = Math.min(head, this.heads - 1);
      const { canvas, rows, columns } = this, context = canvas.getContext("2d");
      canvas.width = columns; canvas.height = rows;
      canvas.setAttribute("aria-label", `attention map of ${this.model.name}, layer ` +
        `${this.layer + 1}, head ${this.head + 1}: ${rows} queries, ${columns} keys`);
      const image = context.createImageData(columns, rows);
      const style = getComputedStyle(this.root);
      const rgb = (name) => style.getPropertyValue(name).split(",").map(Number);
      const positive = rgb("--weight"), negative = rgb("--negative");
      for (let row = 0; row < rows; row++) {
        const weights = this.row(this.layer, this.head, row);
        const top = Math.max(...weights.map(Math.abs)) || 1;
        weights.forEach((weight, column) => {
          const at = 4 * (row * columns + column), colour = weight < 0 ? negative : positive;
          for (let part = 0; part < 3; part++) image.data[at + part] = colour[part];
          // Only exact zeros stay blank.
          image.data[at + 3] = weight === 0 ? 0 : 24 + 231 * Math.sqrt(Math.abs(weight) / top);
        });
      }
      context.putImageData(image, 0, 0);
    }

    choose(row) {
      row = Math.max(0, Math.min(row, this.rows - 1));
      this.chosen = row;
      [...this.queries.children].forEach((button, index) => {
        button.classList.toggle("chosen", index === row);
        button.tabIndex = index === row ? 0 : -1;
      });
      const weights = this.row(this.layer, this.head, row);
      const visible = this.causal ? row + 1 : this.columns;
      const top = Math.max(...weights.map(Math.abs)) || 1;
      [...this.keys.children].forEach((key, column) => {
        const weight = weights[column], hidden = column >= visible;
        key.classList.toggle("hidden", hidden);
        key.classList.toggle("zero", !hidden && weight === 0);
        key.title = hidden ? "not visible to this query" : weight.toFixed(4);
        key.style.background = hidden || weight === 0 ? "none"
          : `rgba(var(${weight < 0 ? "--negative" : "--weight"}), ${0.08 + 0.72 * Math.abs(weight) / top})`;
      });
      const sizes = weights.slice(0, visible).map(Math.abs);
      const total = sizes.reduce((a, b) => a + b, 0);
      const zeros = sizes.filter((weight) => weight === 0).length;
      const entropy = sizes.reduce((sum, w) => (w > 0 ? sum - (w / total) * Math.log(w / total) : sum), 0);
      const best = weights.slice(0, visible).map((weight, column) => [weight, column])
        .filter(([weight]) => weight !== 0)
        .sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 5)
        .map(([weight, column]) => `“${shown(this.columnTokens[column])}” ${weight.toFixed(3)}`);
      const fact = (label, value, end) => this.facts.append(` ${label} `, el("b", "", value), end);
      this.facts.replaceChildren(`“${shown(this.rowTokens[row])}” reads ` +
        `${best.length ? best.join(", ") : "nothing: a dead row"};`);
      fact("row sum", this.data.row_sums[this.layer][this.head][row].toFixed(3), ",");
      fact("exact zeros", `${zeros} of ${visible}`, ",");
      fact("entropy", entropy.toFixed(2), ".");
    }

    onKey(event) {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      let row = step === undefined ? undefined : this.chosen + step;
      if (event.key === "Home") row = 0;
      if (event.key === "End") row = this.rows - 1;
      if (row === undefined) return;
      event.preventDefault();
      this.queries.children[Math.max(0, Math.min(row, this.rows - 1))].focus();
    }
  }

  class View {
    constructor(root) {
      const data = JSON.parse(root.querySelector("script").textContent);
      this.controls = el("div", "controls");
      this.panels = data.models.map((model) => new Panel(this, model));
      const first = data.models[0];
      this.text = this.select("text", first.texts.map((text) => text.name), 0, true);
      this.site = this.select("attention", ["encoder", "decoder", "cross"], 2, true);
      this.layer = this.select("layer", [], 0, false);
      this.head = this.select("head", [], 0, false);
      const grid = el("div", "panels");
      grid.append(...this.panels.map((panel) => panel.root));
      root.append(this.controls, grid, el("p", "note",
        "Colours are relative to the largest weight of the row. Row sums are those of the weights shown."));
      this.reload();
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    }

    select(label, names, start, reloads) {
      const box = el("select"), wrap = el("label", "", label);
      box.append(...names.map((name, index) => new Option(name, index)));
      box.selectedIndex = start;
      box.addEventListener("change", () => (reloads ? this.reload() : this.redraw()));
      wrap.append(box);
      this.controls.append(wrap);
      return box;
    }

    reload() {
      const site = ["encoder", "decoder", "cross"][this.site.selectedIndex];
      this.panels.forEach((panel) => panel.load(this.text.selectedIndex, site));
      for (const [box, count] of [[this.layer, "layers"], [this.head, "heads"]]) {
        const most = Math.max(...this.panels.map((panel) => panel[count]));
        const start = Math.max(0, Math.min(box.selectedIndex, most - 1));
        box.replaceChildren(...Array.from({ length: most }, (_, at) => new Option(at + 1, at)));
        box.selectedIndex = count === "layers" && !this.started ? most - 1 : start;
      }
      this.started = true;
      this.chosen = Math.min(1, this.panels[0].rows - 1);
      this.redraw();
    }

    redraw() {
      this.panels.forEach((panel) => {
        panel.draw(this.layer.selectedIndex, this.head.selectedIndex);
        panel.choose(this.chosen);
      });
    }

    // Other panels follow; where their tokens differ, by relative position.
    choose(row, source) {
      if (row === this.chosen && source.chosen === row) return;
      this.chosen = row;
      this.panels.forEach((panel) => panel.choose(panel.rows === source.rows ? row
        : Math.round(row * (panel.rows - 1) / Math.max(1, source.rows - 1))));
    }
  }

  document.querySelectorAll(".amap").forEach((root) => new View(root));
  // For pages that add views later.
  window.attentionMapView = (root) => new View(root);
})();
