// Kernels as pictures: a byte an entry, viridis from 0 to 1, one canvas a network, all at the slider's depth.

const STOPS = [
  [68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140],
  [40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37],
];
const LEVELS = 254;

function colourOf(cosine) {
  const place = Math.min(Math.max(cosine, 0), 1) * (STOPS.length - 1);
  const i = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[i].map((value, channel) => value + (place - i) * (STOPS[i + 1][channel] - value));
}

const PALETTE = Array.from({ length: LEVELS + 1 }, (_, level) => colourOf((2 * level) / LEVELS - 1));

class Kernel {
  constructor(holder, network) {
    this.network = network;
    const { side, bytes } = network.kernels;
    this.side = side;
    this.triangle = (side * (side + 1)) / 2;
    this.levels = Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
    this.figure = html(holder, "figure", "");
    this.canvas = html(this.figure, "canvas", "");
    this.canvas.width = this.canvas.height = side;
    this.canvas.setAttribute("role", "img");
    const caption = html(this.figure, "figcaption", "");
    html(caption, "b", "", breakable(network.name));
    this.reading = html(caption, "span", "reading");
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.describe());
  }

  // The deepest kernel kept that is not deeper than the block asked for.
  show(block) {
    const kept = this.network.kernels.blocks;
    const position = Math.max(0, kept.filter((b) => b <= block).length - 1);
    this.start = position * this.triangle;
    this.block = kept[position];
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(this.side, this.side);
    for (let i = 0; i < this.side; i++)
      for (let j = 0; j < this.side; j++) {
        const level = this.level(i, j);
        if (level > LEVELS) continue;
        const [red, green, blue] = PALETTE[level];
        image.data.set([red, green, blue, 255], 4 * (i * this.side + j));
      }
    context.putImageData(image, 0, 0);
    this.canvas.dataset.block = this.block;
    this.describe();
  }

  level(i, j) {
    const [low, high] = i < j ? [i, j] : [j, i];
    return this.levels[this.start + low * this.side - (low * (low - 1)) / 2 + (high - low)];
  }

  describe() {
    const at = this.network.blocks.indexOf(this.block);
    const mean = this.network.columns.cosine_mean ? this.network.columns.cosine_mean[at] : null;
    const where = blockName(this.block, this.network);
    this.reading.textContent = `${where}, mean cosine ${words(mean)}`;
    this.canvas.setAttribute("aria-label", `Cosines between locations of ${this.network.name}, ${where}, mean ${words(mean)}`);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const place = (offset, size) => Math.min(Math.max(Math.floor((offset / size) * this.side), 0), this.side - 1);
    const i = place(event.clientY - box.top, box.height), j = place(event.clientX - box.left, box.width);
    const level = this.level(i, j), stride = this.network.kernels.stride;
    const cosine = level > LEVELS ? "none" : ((2 * level) / LEVELS - 1).toFixed(2);
    this.reading.textContent = `locations ${i * stride} and ${j * stride}: cosine ${cosine}`;
  }
}

function blockName(block, network) {
  if (block === 0) return "input";
  return network ? `block ${block} of ${network.blocks[network.blocks.length - 1]}` : `block ${block}`;
}
