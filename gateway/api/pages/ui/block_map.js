// A canvas with one cell per block, coloured by state. This module does not depend on the API.

export const STATES = { 1: "free", 2: "reserved", 3: "sealed", 4: "cached", 5: "quarantine" };
const MOST_PX = 20;
const LEAST_PX = 2;
const MANY = 20000; // above this number of cells, a cell is a pixel of a small image, which is drawn enlarged
const FLASH_MS = 500;

export class BlockMap {
  // `onPick(cell)` is called with the cell under the pointer or the keyboard's cursor, or null.
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.onPick = onPick;
    this.states = new Uint8Array(0);
    this.changedAt = new Float64Array(0);
    this.lit = new Map();
    this.cursor = null;
    canvas.addEventListener("pointermove", (event) => this.pick(this.cellAt(event)));
    canvas.addEventListener("pointerdown", (event) => this.pick(this.cellAt(event)));
    canvas.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.layOut()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.layOut());
  }

  // Shows the states of all cells.
  setAll(states) {
    this.states = states;
    this.changedAt = new Float64Array(states.length).fill(performance.now());
    this.cursor = null;
    this.layOut();
  }

  // Shows new states of some cells, and marks these cells for a moment.
  change(cells, states) {
    const now = performance.now();
    cells.forEach((cell, i) => {
      this.states[cell] = states[i];
      this.changedAt[cell] = now;
    });
    this.draw(cells, true);
    setTimeout(() => this.draw(cells), FLASH_MS);
  }

  // Lights cells. `lit` maps a cell to the number of requests that use it.
  light(lit) {
    this.lit = lit;
    this.drawAll();
  }

  layOut() {
    const frame = this.canvas.parentElement;
    const width = frame.clientWidth - 2 * parseFloat(getComputedStyle(frame).paddingLeft);
    const count = this.states.length;
    if (width <= 0 || !count) return;
    const area = width * Math.max(180, Math.min(560, innerHeight * 0.55));
    this.size = Math.max(LEAST_PX, Math.min(MOST_PX, Math.floor(Math.sqrt(area / count))));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const height = Math.ceil(count / this.columns) * this.size;
    const scale = devicePixelRatio;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.context = this.canvas.getContext("2d");
    this.context.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    this.colours = new Map(Object.entries(STATES).map(([number, name]) => [Number(number), style.getPropertyValue(`--${name}`)]));
    [this.flash, this.litColour, this.sharedColour, this.back] = ["--text", "--lit", "--shared", "--panel"].map((name) =>
      style.getPropertyValue(name));
    this.small = count > MANY ? new SmallImage(this.columns, Math.ceil(count / this.columns), this.colours, this.flash) : null;
    this.drawAll();
  }

  drawAll() {
    if (!this.context) return;
    const { context, states } = this;
    context.fillStyle = this.back;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    if (this.small) {
      this.small.paint(states);
      this.enlarge();
    } else {
      for (let cell = 0; cell < states.length; cell++) this.fill(cell, this.colours.get(states[cell]) ?? this.back);
    }
    this.drawMarks(this.lit.keys());
  }

  draw(cells, isFresh = false) {
    if (!this.context) return;
    if (this.small) {
      for (const cell of cells) this.small.set(cell, isFresh ? SmallImage.FLASH : this.states[cell]);
      this.enlarge();
      this.drawMarks(this.lit.keys());
      return;
    }
    for (const cell of cells) this.fill(cell, isFresh ? this.flash : this.colours.get(this.states[cell]) ?? this.back);
    this.drawMarks(cells);
  }

  enlarge() {
    this.context.imageSmoothingEnabled = false;
    const { canvas } = this.small.flush();
    this.context.drawImage(canvas, 0, 0, canvas.width * this.size, canvas.height * this.size);
  }

  fill(cell, colour) {
    const [x, y] = this.corner(cell);
    const inner = this.size - (this.size > 4 ? 1 : 0);
    this.context.fillStyle = this.back;
    this.context.fillRect(x, y, this.size, this.size);
    this.context.fillStyle = colour;
    this.context.fillRect(x, y, inner, inner);
  }

  // Draws the frames of those of the cells that are lit, and of the cursor.
  drawMarks(cells) {
    for (const cell of cells) if (this.lit.has(cell)) this.mark(cell);
    if (this.cursor !== null) this.frame(this.cursor, this.flash);
  }

  mark(cell) {
    this.frame(cell, this.lit.get(cell) > 1 ? this.sharedColour : this.litColour);
  }

  frame(cell, colour) {
    const [x, y] = this.corner(cell);
    const thick = Math.max(1, Math.min(3, Math.floor(this.size / 5)));
    this.context.strokeStyle = colour;
    this.context.lineWidth = thick;
    this.context.strokeRect(x + thick / 2, y + thick / 2, this.size - 1 - thick, this.size - 1 - thick);
  }

  corner(cell) {
    return [(cell % this.columns) * this.size, Math.floor(cell / this.columns) * this.size];
  }

  cellAt(event) {
    const column = Math.floor(event.offsetX / this.size);
    const cell = Math.floor(event.offsetY / this.size) * this.columns + column;
    return column < this.columns && cell < this.states.length ? cell : null;
  }

  move(event) {
    const last = this.states.length - 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns, Home: -last, End: last };
    if (!(event.key in steps) || last < 0) return;
    event.preventDefault();
    this.pick(this.cursor === null ? 0 : Math.max(0, Math.min(last, this.cursor + steps[event.key])));
  }

  pick(cell) {
    if (cell === this.cursor) return;
    const before = this.cursor;
    this.cursor = cell;
    if (before !== null) this.draw([before]);
    if (cell !== null) this.draw([cell]);
    this.onPick(cell);
  }
}

// Returns the pixels of CSS colours, as numbers.
function pixelsOf(colours) {
  const context = new OffscreenCanvas(colours.length, 1).getContext("2d");
  colours.forEach((colour, i) => {
    context.fillStyle = colour;
    context.fillRect(i, 0, 1, 1);
  });
  return new Uint32Array(context.getImageData(0, 0, colours.length, 1).data.buffer);
}

// An image with one pixel per cell.
class SmallImage {
  static FLASH = 255;

  constructor(width, height, colours, flash) {
    this.canvas = new OffscreenCanvas(width, height);
    this.context = this.canvas.getContext("2d");
    this.image = this.context.createImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.palette = new Uint32Array(256);
    const states = [...colours, [SmallImage.FLASH, flash]];
    const found = pixelsOf(states.map(([, colour]) => colour));
    states.forEach(([state], i) => (this.palette[state] = found[i]));
  }

  set(cell, state) {
    this.pixels[cell] = this.palette[state];
  }

  paint(states) {
    for (let cell = 0; cell < states.length; cell++) this.pixels[cell] = this.palette[states[cell]];
  }

  flush() {
    this.context.putImageData(this.image, 0, 0);
    return this;
  }
}
