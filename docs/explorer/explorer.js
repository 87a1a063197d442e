// The explorer: controls, the mask, and the hyperplane of one query. No library, no server.
"use strict";

(() => {
  const home = document.getElementById("smat-explorer");
  if (!home) return;
  const WIDTH = 64; // of a head: what sizes in bytes are told for
  const state = { seqLen: 128, vcDim: 3, fieldSize: 0, schedule: "rebuilt", step: 32, query: 100 };
  let mask, bits;

  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };

  const control = (name, label, input, shown) => {
    const output = element("output", { id: `smat-${name}-shown` });
    input.id = `smat-${name}`;
    input.addEventListener("input", () => {
      state[name] = input.tagName === "SELECT" && name === "schedule" ? input.value : Number(input.value);
      refresh();
    });
    shown.set(name, output);
    return element("label", { for: input.id }, element("span", {}, label), input, output);
  };

  const slider = (min, max, step, value) =>
    element("input", { type: "range", min, max, step, value });

  const choice = (options, value) => {
    const made = element("select");
    for (const [key, text] of options) made.append(element("option", { value: key }, text));
    made.value = value;
    return made;
  };

  const shown = new Map();
  const inputs = {
    seqLen: slider(16, 512, 16, state.seqLen),
    vcDim: slider(1, 4, 1, state.vcDim),
    fieldSize: choice([[0, "smallest that suits"], ...[2, 3, 5, 7, 11, 13, 17, 19, 23].map((q) => [q, q])], 0),
    schedule: choice([["rebuilt", "fixed, in the middle"], ["window", "stepped window"],
      ["doubling", "doubling"], ["none", "none"]], state.schedule),
    step: slider(4, 128, 4, state.step),
    query: slider(0, state.seqLen - 1, 1, state.query),
  };
  const labels = { seqLen: "Length T", vcDim: "VC dimension d", fieldSize: "Field size q",
    schedule: "Boundary", step: "Step of the window", query: "Query t" };
  const controls = element("div", { class: "smat-controls" },
    ...Object.entries(inputs).map(([name, input]) => control(name, labels[name], input, shown)));
  const picture = element("canvas", { id: "smat-mask", role: "img", "aria-label": "The mask; choose a query" });
  const space = element("canvas", { id: "smat-space", role: "img", "aria-label": "The query's hyperplane" });
  const spaceTitle = element("p", { class: "smat-title" });
  const told = element("p", { id: "smat-told", "aria-live": "polite" });
  const facts = element("dl", { id: "smat-facts" });
  home.append(controls,
    element("div", { class: "smat-views" },
      element("figure", {}, element("p", { class: "smat-title" }, "Who sees whom: a row is a query, a column a key"), picture),
      element("figure", {}, spaceTitle, space, told)),
    facts);

  const colour = (name) => getComputedStyle(home).getPropertyValue(`--smat-${name}`).trim();

  const chunkOf = (seqLen) => 2 ** Math.min(6, Math.max(0, Math.floor(Math.log2(seqLen / 8))));

  const refresh = () => {
    const chunkSize = chunkOf(state.seqLen);
    inputs.query.max = state.seqLen - 1;
    state.query = Math.min(state.query, state.seqLen - 1);
    inputs.query.value = state.query;
    inputs.step.disabled = state.schedule !== "window";
    const key = JSON.stringify({ ...state, query: 0 });
    if (key !== refresh.key) {
      mask = SmatMasks.maskOf({ ...state, chunkSize });
      bits = mask.dense();
      refresh.key = key;
      tell(chunkSize);
    }
    for (const [name, output] of shown) {
      output.textContent = { fieldSize: `q = ${mask.geometry.fieldSize}`, schedule: "" }[name] ?? state[name];
    }
    drawMask();
    drawSpace();
  };

  // Colours: causal, on the hyperplane, off it; the chosen query's row is lit up.
  const drawMask = () => {
    const T = state.seqLen, scale = Math.max(1, Math.floor(768 / T));
    picture.width = picture.height = T * scale;
    const pen = picture.getContext("2d");
    pen.fillStyle = colour("future");
    pen.fillRect(0, 0, picture.width, picture.height);
    const colours = { causal: colour("causal"), on: colour("on"), off: colour("off"), lit: colour("lit") };
    for (let t = 0; t < T; t++) {
      const n = mask.boundary(t), isChosen = t === state.query;
      for (let j = 0; j <= t; j++) {
        const seen = bits[t * T + j] === 1;
        pen.fillStyle = j >= n ? colours.causal : seen ? colours.on : colours.off;
        if (isChosen && seen) pen.fillStyle = colours.lit;
        pen.fillRect(j * scale, t * scale, scale, scale);
      }
    }
    pen.strokeStyle = colours.lit;
    pen.lineWidth = Math.max(1, scale / 3);
    pen.strokeRect(0, state.query * scale - 0.5, (state.query + 1) * scale, scale + 1);
  };

  // F_q is a row, F_q^2 a square, F_q^3 its slices; a cell has the number of distant keys on it.
  const drawSpace = () => {
    const { geometry } = mask, q = geometry.fieldSize, n = mask.boundary(state.query);
    const type = mask.queryType(state.query);
    const columns = geometry.dim === 3 ? Math.ceil(Math.sqrt(q)) : 1;
    const slices = geometry.dim === 3 ? q : 1;
    const across = geometry.dim === 0 ? 1 : q, down = geometry.dim >= 2 ? q : 1;
    const rows = Math.ceil(slices / columns);
    const cell = Math.max(3, Math.floor(Math.min(460 / (columns * (across + 1)), 460 / (rows * (down + 1)), 34)));
    space.width = columns * (across + 1) * cell;
    space.height = rows * (down + 1) * cell;
    const pen = space.getContext("2d");
    const counts = new Map();
    for (let j = 0; j < n; j++) counts.set(mask.profile(j), (counts.get(mask.profile(j)) ?? 0) + 1);
    for (let profile = 0; profile < geometry.numProfiles; profile++) {
      const x = geometry.point(profile);
      const [slice, row, column] = [...new Array(3 - x.length).fill(0), ...x];
      const left = (slice % columns) * (across + 1) * cell + column * cell;
      const top = Math.floor(slice / columns) * (down + 1) * cell + row * cell;
      pen.fillStyle = colour(n > 0 && geometry.contains(type, profile) ? "lit" : "off");
      pen.fillRect(left, top, cell - 1, cell - 1);
      if (cell >= 16 && counts.has(profile)) {
        pen.fillStyle = colour("ink");
        pen.font = `${Math.floor(cell / 2)}px sans-serif`;
        pen.textAlign = "center";
        pen.fillText(counts.get(profile), left + cell / 2, top + 0.68 * cell);
      }
    }
    describe(n, type, geometry);
  };

  const describe = (n, type, geometry) => {
    const places = { 0: "one point", 1: "F_q, a line of q points", 2: "F_q², a plane",
      3: "F_q³, slice by slice" };
    spaceTitle.textContent = `${places[geometry.dim]}: points of keys, and the query's hyperplane`;
    const keys = [];
    for (let j = 0; j < n; j++) if (bits[state.query * state.seqLen + j]) keys.push(j);
    const { direction, offset } = geometry.hyperplane(type);
    const terms = direction.map((a, axis) => (a ? `${a === 1 ? "" : a}x${axis + 1}` : "")).filter(Boolean);
    const equation = geometry.dim ? `${terms.join(" + ")} = ${offset} (mod ${geometry.fieldSize})` : "all points";
    const list = keys.slice(0, 24).join(", ") + (keys.length > 24 ? ", …" : "");
    told.textContent = n === 0
      ? `Query ${state.query} has no distant keys: it sees all ${state.query + 1} keys.`
      : `Query ${state.query} reads type ${type}: ${equation}. Of ${n} distant keys it sees ${keys.length}: ` +
        `${list || "none"}. It sees all ${state.query + 1 - n} recent ones.`;
  };

  const tell = (chunkSize) => {
    const { geometry } = mask, states = SmatMasks.cacheStates(mask);
    const size = WIDTH * (WIDTH + 1);
    const bytes = states * size * 4;
    const causal = state.seqLen * (2 * size + chunkSize * (2 * WIDTH + 1));
    let tables = mask.numDistant > 0 ? 1 : 0;
    if (mask.moves) tables = new Set(Array.from({ length: state.seqLen }, (_, t) => mask.boundary(t))).size - 1;
    const more = mask.numDistant > 0 && mask.vcDim > 1
      ? (state.seqLen + tables * SmatMasks.additions(geometry)) * size : 0;
    const rows = {
      "points P": geometry.numProfiles, "types B": geometry.numTypes, "distant n": mask.numDistant,
      "VC = d": mask.isProved ? "proved" : mask.moves ? "not proved: the boundary moves" : "not proved: too short",
      "additions a table": SmatMasks.additions(geometry),
      "work": `${(1 + more / causal).toFixed(2)} × linear attention`,
      "decoding cache": `${states.toLocaleString("en")} states, ${(bytes / 1e6).toFixed(1)} MB a head of ${WIDTH} in fp32`,
      "softmax would keep": `${(state.seqLen * 2 * WIDTH * 4 / 1e6).toFixed(2)} MB`,
    };
    facts.replaceChildren(...Object.entries(rows).map(([name, text]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, typeof text === "number" ? text.toLocaleString("en") : text))));
  };

  const choose = (event) => {
    const box = picture.getBoundingClientRect();
    const t = Math.floor(((event.clientY - box.top) / box.height) * state.seqLen);
    if (t >= 0 && t < state.seqLen && t !== state.query) {
      state.query = t;
      inputs.query.value = t;
      refresh();
    }
  };
  picture.addEventListener("pointermove", choose);
  picture.addEventListener("pointerdown", choose);
  new MutationObserver(() => refresh()).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
  refresh();
})();
