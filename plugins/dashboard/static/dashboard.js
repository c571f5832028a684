// Tokens under messages, tooltips, live pages. All text by agents is inserted as textContent.
"use strict";
(() => {
  const find = (query, from = document) => from.querySelector(query);
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const made = (tag, style, text) => {
    const element = document.createElement(tag);
    if (style) element.className = style;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // ---- tooltips of tokens and of elements with data-tip
  const tip = find("#tip");
  function showTip(text, box) {
    tip.textContent = text;
    tip.hidden = false;
    const own = tip.getBoundingClientRect();
    const left = Math.min(Math.max(4, box.left), innerWidth - own.width - 4);
    const below = box.bottom + 6;
    tip.style.left = `${left}px`;
    tip.style.top = `${below + own.height > innerHeight ? Math.max(4, box.top - own.height - 6) : below}px`;
  }
  const hideTip = () => { tip.hidden = true; };
  function point(target) {
    const token = target.closest?.(".t");
    if (token) return showTip(told(token), token.getClientRects()[0]);
    const other = target.closest?.("[data-tip]");
    if (other) return showTip(other.dataset.tip, other.getBoundingClientRect());
    hideTip();
  }
  document.addEventListener("mouseover", (event) => point(event.target));
  let wish = 0;
  function soon(act) { // after the scrolling that a focus causes; only the last request is carried out
    wish += 1;
    const mine = wish;
    requestAnimationFrame(() => requestAnimationFrame(() => { if (mine === wish) act(); }));
  }
  document.addEventListener("focusin", (event) => { if (event.target.dataset?.tip) soon(() => point(event.target)); });
  document.addEventListener("focusout", hideTip);
  document.addEventListener("scroll", hideTip, { passive: true, capture: true });

  // ---- tokens of one session, or of two side by side, with one colour scale
  const main = find("#main");
  const sessions = [...new Set(all("[data-session]").map((one) => one.dataset.session))];
  const loaded = new Map();
  const sessionOf = (element) => element.closest("[data-session]").dataset.session;
  const dataOf = (element) => loaded.get(sessionOf(element));
  let colour = "fate";
  let scales = {};
  const drawn = new Set();
  const SHADES = 7;
  const LOGPROBS = [0.99, 0.9, 0.7, 0.5, 0.2, 0.05];
  const AWAY = { gap: [1e-3, 1e-2, 1e-1], ratio: [0.01, 0.1, 0.4] };
  const figure = (value) => value === null || value === undefined ? "–" : String(Number(value.toPrecision(4)));

  function spread(runs, length) {
    const found = new Array(length);
    let at = 0;
    for (const [value, often] of runs) { found.fill(value, at, at + often); at += often; }
    return found;
  }
  function turnOf(box) {
    const turn = dataOf(box)?.turns[Number(box.dataset.tokens)];
    if (turn && !turn.fates) {
      turn.fates = spread(turn.fate, turn.ids.length);
      turn.version = spread(turn.versions, turn.ids.length);
    }
    return turn;
  }
  const away = (value, steps) => {
    const size = Math.abs(value);
    const level = steps.filter((step) => size >= step).length;
    return `d${value < 0 ? 3 - level : 3 + level}`;
  };
  const STYLES = {
    fate: (turn, at, data) => `k-${data.reasons[turn.fates[at]] || "trained"}`,
    "log-prob": (turn, at) => {
      const chance = Math.exp(turn.logprobs[at]);
      const level = LOGPROBS.findIndex((least) => chance >= least);
      return `q${level < 0 ? SHADES - 1 : level}`;
    },
    advantage: (turn) => turn.advantage === null ? "na" : away(turn.advantage / (scales.advantage || 1), [0.05, 0.4, 0.8]),
    version: (turn, at) => `v${scales.versions.indexOf(turn.version[at]) % 6}`,
    entropy: (turn, at) => {
      const value = turn.figures?.entropy?.[at] ?? null;
      return value === null ? "na" : `q${Math.min(SHADES - 1, Math.floor(value / (scales.entropy || 1) * SHADES))}`;
    },
    gap: (turn, at) => {
      const value = turn.figures?.gap?.[at] ?? null;
      return value === null ? "na" : away(value, AWAY.gap);
    },
    ratio: (turn, at) => {
      const value = turn.figures?.ratio?.[at] ?? null;
      return value === null ? "na" : away(Math.log(value), AWAY.ratio);
    },
  };
  const textOf = (data, id) => (data.texts[id] ?? `${id} `).replaceAll("\n", "⏎\n");

  function paint(box) {
    const data = dataOf(box);
    const turn = turnOf(box);
    const style = STYLES[colour];
    const special = scales.special;
    const spans = find(".out", box).children;
    for (let at = 0; at < spans.length; at += 1) {
      spans[at].className = `t ${style(turn, at, data)}${special.has(turn.ids[at]) ? " special" : ""}`;
    }
  }
  function fill(box) {
    const data = dataOf(box);
    const turn = turnOf(box);
    if (!turn || drawn.has(box)) return;
    drawn.add(box);
    const prompt = made("details", "prompt");
    prompt.append(made("summary", "", `prompt: ${turn.context} tokens before, ${turn.delta.length} new`));
    prompt.addEventListener("toggle", () => {
      if (prompt.children.length > 1) return;
      const body = made("div");
      for (const id of turn.delta) body.append(made("span", `p${scales.special.has(id) ? " special" : ""}`, textOf(data, id)));
      prompt.append(body);
    });
    prompt.open = main.dataset.show === "tokens";
    const out = made("div", "out");
    out.tabIndex = 0;
    out.setAttribute("role", "group");
    out.setAttribute("aria-label", `${turn.ids.length} tokens of turn ${box.dataset.tokens}; arrow keys go from one to the next`);
    const spans = turn.ids.map((id, at) => {
      const span = made("span", "t", textOf(data, id));
      span.at = at;
      return span;
    });
    out.append(...spans);
    box.replaceChildren(prompt, out);
    paint(box);
  }
  function told(span) {
    const box = span.closest("[data-tokens]");
    const data = dataOf(box);
    const turn = turnOf(box);
    const at = span.at;
    const reason = data.reasons[turn.fates[at]];
    const lines = [
      `id ${turn.ids[at]}  ${JSON.stringify(data.texts[turn.ids[at]] ?? "")}`,
      `log-prob ${figure(turn.logprobs[at])} (${(100 * Math.exp(turn.logprobs[at])).toPrecision(3)} %), version ${turn.version[at]}`,
      reason ? `masked: ${reason.replaceAll("_", " ")}` : `trained in batch ${turn.batch} by step ${turn.step}`,
      `advantage ${figure(turn.advantage)}, segment ${turn.segment ?? "–"}, batch ${turn.batch ?? "–"}, step ${turn.step ?? "–"}`,
    ];
    if (turn.figures) lines.push(["entropy", "gap", "ratio"].map((name) => `${name} ${figure(turn.figures[name]?.[at])}`).join(", "));
    lines.push(`turnlog log why ${sessionOf(box).slice(0, 12)}:${box.dataset.tokens}:${at}`);
    return lines.join("\n");
  }
  const turns = () => [...loaded.values()].flatMap((data) => data.turns);
  function legend() {
    const place = find("#legend");
    const put = (style, text) => {
      const item = made("span");
      item.append(made("i", `swatch ${style}`), text);
      return item;
    };
    const items = [];
    if (colour === "fate") {
      const counts = new Map(); // by reason and session
      const shown = sessions.filter((name) => loaded.has(name));
      shown.forEach((name, place) => {
        const data = loaded.get(name);
        for (const turn of data.turns) for (const [reason, often] of turn.fate) {
          const style = data.reasons[reason] || "trained";
          if (!counts.has(style)) counts.set(style, shown.map(() => 0));
          counts.get(style)[place] += often;
        }
      });
      const sum = (values) => values.reduce((one, other) => one + other, 0);
      for (const [name, often] of [...counts].sort((a, b) => sum(b[1]) - sum(a[1]))) {
        items.push(put(`k-${name}`, `${name.replaceAll("_", " ")} ${often.map((each) => each.toLocaleString("en")).join(" | ")}`));
      }
    } else if (colour === "version") {
      scales.versions.forEach((version, at) => items.push(put(`v${at % 6}`, `version ${version}`)));
    } else if (colour === "log-prob") {
      LOGPROBS.forEach((least, at) => items.push(put(`q${at}`, `≥ ${100 * least} %`)));
      items.push(put("q6", "less"));
    } else if (colour === "entropy") {
      for (let at = 0; at < SHADES; at += 1) items.push(put(`q${at}`, `≥ ${figure(scales.entropy * at / SHADES)}`));
    } else {
      const most = { advantage: scales.advantage, gap: "0.1 nats", ratio: "1.5" }[colour];
      const least = { advantage: -scales.advantage, gap: "-0.1 nats", ratio: "0.67" }[colour];
      items.push(put("d0", typeof least === "number" ? figure(least) : `≤ ${least}`), put("d1", ""), put("d2", ""), put("d3", colour === "ratio" ? "1" : "0"));
      items.push(put("d4", ""), put("d5", ""), put("d6", typeof most === "number" ? figure(most) : `≥ ${most}`));
    }
    if (["entropy", "gap", "ratio"].includes(colour) && !turns().some((turn) => turn.figures)) {
      items.splice(0, items.length, made("span", "dim", "no step has left a file of its tokens ([trainer] token_files_every)"));
    }
    place.replaceChildren(...items);
  }
  function measure() {
    const versions = new Set();
    let advantage = 0;
    let entropy = 0;
    for (const turn of turns()) {
      for (const [version] of turn.versions) versions.add(version);
      advantage = Math.max(advantage, Math.abs(turn.advantage ?? 0));
      for (const value of turn.figures?.entropy ?? []) entropy = Math.max(entropy, value ?? 0);
    }
    const special = [...loaded.values()].flatMap((data) => data.special);
    scales = { versions: [...versions].sort((a, b) => a - b), advantage, entropy, special: new Set(special) };
  }
  function note(missing) {
    const notes = [...loaded.values()].flatMap((data) => data.notes);
    const waits = loaded.size < sessions.length && !missing ? ["reading its tokens…"] : [];
    find("#notes").textContent = [...new Set(notes), ...waits, ...(missing ? [missing] : [])].join(" · ");
  }
  function show(name, data) {
    loaded.set(name, data);
    measure();
    note();
    legend();
    drawn.forEach(paint);
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) {
          near.unobserve(entry.target);
          const box = find("[data-tokens]", entry.target);
          fill(box);
        }
      }
    }, { rootMargin: "400px 0px" });
    all(".turn[data-turn]").filter((turn) => sessionOf(turn) === name).forEach((turn) => near.observe(turn));
    for (const node of all(".tree a[data-turn]")) {
      const turn = data.turns[Number(node.dataset.turn)];
      if (!turn) continue;
      const trained = turn.fate.reduce((sum, [reason, often]) => sum + (data.reasons[reason] === "" ? often : 0), 0);
      node.dataset.trained = trained === 0 ? "none" : trained === turn.ids.length ? "all" : "some";
    }
    performance.mark("tokens");
  }
  function begin() {
    main.dataset.show = "both";
    find(".tools").addEventListener("change", (event) => {
      if (event.target.name === "show") {
        main.dataset.show = event.target.value;
        if (event.target.value === "tokens") for (const box of drawn) find(".prompt", box).open = true;
      } else if (event.target.name === "colour") {
        colour = event.target.value;
        drawn.forEach(paint);
        if (loaded.size) legend();
      }
    });
    find(".tools").addEventListener("submit", (event) => event.preventDefault());
    const now = new IntersectionObserver((entries) => {
      for (const entry of entries) find(`.tree a[data-turn="${entry.target.dataset.turn}"]`)?.classList.toggle("now", entry.isIntersecting);
    }, { rootMargin: "-20% 0px -60% 0px" });
    all(".turn[data-turn]").forEach((turn) => now.observe(turn));
    note();
    const inlined = find("#tokens");
    if (inlined) { show(sessions[0], JSON.parse(inlined.textContent)); return; }
    for (const name of sessions) {
      fetch(`/sessions/${encodeURIComponent(name)}/tokens`)
        .then(async (answer) => {
          const body = await answer.json();
          if (!answer.ok) throw new Error(body.error);
          show(name, body);
        })
        .catch((error) => note(`the tokens of ${name.slice(0, 12)} cannot be shown: ${error.message}`));
    }
  }
  function step(out, to) {
    const spans = out.children;
    if (!spans.length) return;
    const old = out.cur ?? -1;
    if (spans[old]) spans[old].classList.remove("cur");
    out.cur = Math.min(Math.max(0, to(old, spans.length)), spans.length - 1);
    const span = spans[out.cur];
    span.classList.add("cur");
    span.scrollIntoView({ block: "nearest" });
    soon(() => showTip(told(span), span.getClientRects()[0]));
  }
  const KEYS = { ArrowRight: (at) => at + 1, ArrowLeft: (at) => at - 1, Home: () => 0, End: (_, count) => count - 1 };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { wish += 1; hideTip(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const out = event.target.closest?.(".out");
    if (out && KEYS[event.key]) { event.preventDefault(); step(out, KEYS[event.key]); return; }
    if (!sessions.length || event.target.matches?.("input, select, textarea") || !["j", "k"].includes(event.key)) return;
    const stops = all(find(".pair") ? ".pair" : ".turn[data-turn]");
    const here = stops.findIndex((stop) => stop.getBoundingClientRect().bottom > 120);
    const next = stops[Math.min(Math.max(0, here + (event.key === "j" ? 1 : -1)), stops.length - 1)];
    next?.scrollIntoView();
  });
  if (sessions.length) begin();

  // ---- parts of a page that are requested separately
  for (const place of all("[data-load]")) {
    let busy = false;
    const load = () => {
      if (busy) return;
      busy = true;
      fetch(place.dataset.load).then(async (answer) => {
        const text = await answer.text();
        if (answer.ok) place.innerHTML = text; // rendered by the server: every value in it is escaped
        else place.textContent = JSON.parse(text).error;
      }).catch((error) => { place.textContent = error.message; }).finally(() => { busy = false; });
    };
    load();
    if (place.dataset.every) setInterval(() => { if (!document.hidden) load(); }, 1000 * Number(place.dataset.every));
  }

  // ---- live page: one stream, one reload at a time, newest state wins
  if (document.body.hasAttribute("data-live")) {
    const source = new EventSource("/live");
    let busy = false;
    let again = false;
    const mark = (state) => { const place = find("#as-of"); if (place) place.className = `as-of ${state}`; };
    async function refresh() {
      if (document.hidden || busy) { again = true; return; }
      busy = true;
      again = false;
      try {
        const answer = await fetch(location.href);
        if (answer.ok) {
          const page = new DOMParser().parseFromString(await answer.text(), "text/html");
          find("[data-fragment]").replaceWith(find("[data-fragment]", page));
          find("#as-of").replaceWith(find("#as-of", page));
          mark("fresh");
        }
      } catch {
        mark("lost");
      } finally {
        busy = false;
        if (again) refresh();
      }
    }
    source.addEventListener("here", () => mark("fresh"));
    source.addEventListener("moved", refresh);
    source.addEventListener("lost", () => mark("lost"));
    source.addEventListener("error", () => mark("lost"));
    document.addEventListener("visibilitychange", () => { if (!document.hidden && again) refresh(); });
    addEventListener("pagehide", () => source.close());
  }
})();
