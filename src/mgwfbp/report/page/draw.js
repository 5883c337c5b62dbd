// Elements, numbers and the tooltip. Text from a file only ever becomes text: textContent, never markup.

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  return fill(element, attributes, children);
}

function makeSvg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  for (const child of children) element.append(child);
  return element;
}

function formatDigits(number, digits) {
  return String(Number(number.toPrecision(digits)));
}

function formatSeconds(seconds) {
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]) {
    if (seconds >= 0.99995 * scale) return `${formatDigits(seconds / scale, 4)} ${unit}`;
  }
  return seconds ? `${formatDigits(seconds * 1e9, 4)} ns` : "0 s";
}

function formatBytes(bytes) {
  for (const [scale, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= scale) return `${formatDigits(bytes / scale, 3)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

function formatCount(number) {
  return Math.abs(number) >= 1e4 ? number.toLocaleString("en", { maximumFractionDigits: 0 }) : formatDigits(number, 4);
}

const FORMATS = {
  s: formatSeconds,
  B: formatBytes,
  "%": (share) => `${formatDigits(share * 100, 4)} %`,
  "": formatCount,
};

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// ---- ticks

function linearTicks(low, high, most) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high * (1 + 1e-9); tick++) ticks.push(tick * step);
  return ticks;
}

function logTicks(low, high, most) {
  const first = Math.floor(Math.log10(low) + 1e-9);
  const last = Math.ceil(Math.log10(high) - 1e-9);
  const every = Math.max(1, Math.ceil((last - first) / most));
  const ticks = [];
  for (let power = first; power <= last; power += every) ticks.push(10 ** power);
  return ticks;
}

// ---- the tooltip, one for the page

const tooltip = {
  element: null,
  show(lines, x, y) {
    if (!this.element) {
      this.element = make("div", { id: "tooltip", role: "status" });
      document.body.append(this.element);
    }
    const [title, ...rest] = lines;
    this.element.replaceChildren(make("strong", {}, title), ...rest.map((line) => make("div", {}, line)));
    this.element.hidden = false;
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), document.documentElement.clientWidth - width - 8);
    const below = y + 18 + height < window.innerHeight;
    this.element.style.left = `${Math.max(8, left)}px`;
    this.element.style.top = `${below ? y + 18 : Math.max(8, y - height - 12)}px`;
  },
  hide() {
    if (this.element) this.element.hidden = true;
  },
};

// ---- tables

function makeTable(table) {
  const head = make("tr", {}, ...table.titles.map((title) => make("th", { scope: "col" }, title)));
  const rows = table.rows.map((row) =>
    make("tr", {}, ...row.map((cell, place) => (place ? make("td", {}, cell) : make("th", { scope: "row" }, cell)))),
  );
  const body = make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
  return make("div", { class: "table", tabindex: 0 }, body);
}

// A table of many rows is made when it is first looked at.
function makeLateTable(title, makeContent) {
  const details = make("details", {}, make("summary", {}, title));
  const open = () => {
    if (details.children.length === 1) details.append(makeTable(makeContent()));
  };
  details.addEventListener("toggle", () => details.open && open());
  window.addEventListener("beforeprint", () => details.closest("figure") && open());
  return details;
}

// ---- pictures are drawn for the width they have, and again when that changes

let pictures = [];

function addPicture(host, draw) {
  pictures.push({ host, draw, width: 0, wasShown: false });
}

function drawPictures(force) {
  pictures = pictures.filter((picture) => picture.host.isConnected || !picture.wasShown); // others were replaced
  for (const picture of pictures) {
    const width = picture.host.clientWidth;
    picture.wasShown = picture.host.isConnected;
    if (width && (force || width !== picture.width)) {
      picture.width = width;
      picture.draw(width);
    }
  }
}
