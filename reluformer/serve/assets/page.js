"use strict";
// The page: sends a document, shows sentences as they arrive, and maps of the words under the pointer.
(() => {
  const $ = (id) => document.getElementById(id);
  const source = $("source"), target = $("target"), status = $("status");
  const ENDINGS = { md: "markdown", markdown: "markdown", html: "html", htm: "html", srt: "srt" };
  const EXTENSION = { text: "txt", markdown: "md", html: "html", srt: "srt" };
  let limit = Infinity, language = "", running = null, result = "", fileName = "";

  const say = (text, isError = false) => {
    status.textContent = text;
    status.classList.toggle("error", isError);
  };

  // One object for each line of a streamed answer.
  async function* linesOf(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) yield JSON.parse(line);
    }
  }

  async function post(path, fields, signal) {
    const headers = { "Content-Type": "application/json" };
    const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(fields), signal });
    if (response.ok) return response;
    const answer = await response.json().catch(() => ({}));
    throw Object.assign(new Error(answer.error || `the server answered ${response.status}`), { isAnswer: true });
  }

  // --- translating ---

  const sentences = new Map();
  let passages = [];

  function addSentence({ number, source: original, target: translation }) {
    const passage = passages[number];
    let paragraph = target.querySelector(`p[data-passage="${passage}"]`);
    if (!paragraph) {
      paragraph = document.createElement("p");
      paragraph.dataset.passage = passage;
      target.append(paragraph);
    }
    const node = document.createElement("span");
    node.className = "sentence";
    node.dataset.number = number;
    translation.split(/\s+/u).filter(Boolean).forEach((text, index) => {
      const word = document.createElement("span");
      word.className = "word";
      word.textContent = text;
      word.dataset.index = index;
      word.tabIndex = target.querySelector(".word") || index ? -1 : 0;
      node.append(index ? " " : "", word);
    });
    paragraph.append(paragraph.childNodes.length ? " " : "", node);
    sentences.set(number, { original, translation, maps: null });
  }

  function reset() {
    target.replaceChildren();
    sentences.clear();
    result = "";
    $("copy").disabled = $("download").disabled = true;
    hideMap();
  }

  function working(isWorking) {
    $("translate").disabled = isWorking;
    $("cancel").hidden = !isWorking;
    target.setAttribute("aria-busy", isWorking);
  }

  async function translate() {
    if (running) return;
    const q = source.value, length = [...q].length;
    if (!q.trim()) return say("There is no text to translate.");
    if (length > limit) {
      return say(`The text has ${length.toLocaleString("en")} characters; ` +
        `at most ${limit.toLocaleString("en")} are allowed.`, true);
    }
    reset();
    running = new AbortController();
    working(true);
    say("Waiting for the server …");
    const start = performance.now();
    let finished = false;
    try {
      const response = await post("stream", { q, format: $("format").value }, running.signal);
      for await (const event of linesOf(response)) {
        if (event.event === "start") passages = event.passages;
        if (event.event === "sentence") {
          addSentence(event);
          say(`${sentences.size} of ${passages.length} sentences`);
        }
        if (event.event === "error") throw Object.assign(new Error(event.error), { isAnswer: true });
        if (event.event === "done") {
          result = event.text;
          finished = true;
        }
      }
      if (!finished) throw new Error("the stream ended early");
      $("copy").disabled = $("download").disabled = false;
      const seconds = ((performance.now() - start) / 1000).toFixed(1);
      say(passages.length ? `${passages.length} sentences in ${seconds} s` : "The document has no text to translate.");
    } catch (error) {
      const done = `${sentences.size} of ${passages.length} sentences are translated.`;
      if (error.name === "AbortError") say(`Cancelled. ${sentences.size ? done : ""}`);
      else if (error.isAnswer) say(`Not translated: ${error.message}.`, true);
      else say(`The connection to the server was lost. ${sentences.size ? done : ""} Translate again when it is back.`, true);
    } finally {
      running = null;
      working(false);
    }
  }

  // --- attention maps ---

  let view = null, shownSentence = null, chosenWord = null, timer = 0;
  const settings = { site: 2, layer: null, head: 0 };

  function hideMap() {
    view = shownSentence = chosenWord = null;
    $("map").replaceChildren();
    $("reads-hint").hidden = false;
  }

  async function choose(word) {
    const node = word.parentElement, number = Number(node.dataset.number);
    target.querySelectorAll(".chosen").forEach((each) => each.classList.remove("chosen"));
    word.classList.add("chosen");
    node.classList.add("chosen");
    chosenWord = word;
    const sentence = sentences.get(number);
    try {
      // Two words of a sentence share one request.
      sentence.maps ||= post("maps", { source: sentence.original, target: sentence.translation })
        .then((response) => response.json());
      const maps = await sentence.maps;
      if (chosenWord !== word) return;
      if (shownSentence !== number) showMap(maps, number);
      const row = maps.rows[Number(word.dataset.index)];
      if (view.site.selectedIndex !== 0) view.choose(row, view.panels[0]);
    } catch (error) {
      sentence.maps = null;
      say(error.isAnswer ? `No map: ${error.message}.` : "The server cannot be reached, so that no map is shown.", true);
    }
  }

  function showMap(maps, number) {
    const root = document.createElement("div"), data = document.createElement("script");
    root.className = "amap";
    data.type = "application/json";
    data.textContent = JSON.stringify(maps);
    root.append(data);
    $("map").replaceChildren(root);
    view = window.attentionMapView(root);
    shownSentence = number;
    // Attention, layer and head stay as they were chosen.
    view.site.selectedIndex = settings.site;
    view.reload();
    if (settings.layer !== null) view.layer.selectedIndex = Math.min(settings.layer, view.layer.length - 1);
    view.head.selectedIndex = Math.min(settings.head, view.head.length - 1);
    view.redraw();
    root.addEventListener("change", () => {
      settings.site = view.site.selectedIndex;
      settings.layer = view.layer.selectedIndex;
      settings.head = view.head.selectedIndex;
    });
    $("reads-hint").hidden = true;
  }

  const wordAt = (event) => event.target.closest?.(".word");
  target.addEventListener("mouseover", (event) => {
    const word = wordAt(event);
    clearTimeout(timer);
    // A pointer that only passes asks for nothing.
    if (word && word !== chosenWord) timer = setTimeout(() => choose(word), 60);
  });
  target.addEventListener("focusin", (event) => wordAt(event) && choose(wordAt(event)));
  target.addEventListener("click", (event) => wordAt(event)?.focus({ preventScroll: true }));
  target.addEventListener("keydown", (event) => {
    const words = [...target.querySelectorAll(".word")], at = words.indexOf(event.target);
    const next = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: words.length - 1 }[event.key];
    if (at < 0 || next === undefined || !words[next]) return;
    event.preventDefault();
    words[at].tabIndex = -1;
    words[next].tabIndex = 0;
    words[next].focus();
  });

  // --- text, files, results ---

  function count() {
    const length = [...source.value].length;
    $("count").textContent = `${length.toLocaleString("en")} of ${limit === Infinity ? "…" : limit.toLocaleString("en")} characters`;
    $("count").classList.toggle("over", length > limit);
  }

  async function openFile(file) {
    if (!file) return;
    if (file.size > 12 * limit) return say(`${file.name} is larger than ${limit.toLocaleString("en")} characters.`, true);
    try {
      source.value = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      return say(`${file.name} is not UTF-8 text.`, true);
    }
    fileName = file.name;
    $("format").value = ENDINGS[file.name.split(".").pop().toLowerCase()] || "text";
    count();
    say(`${file.name} is ready.`);
  }

  function download() {
    const extension = EXTENSION[$("format").value];
    const name = fileName ? fileName.replace(/(\.[^.]*)?$/, `.${language}$1`) : `translation.${language}.${extension}`;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([result], { type: "text/plain;charset=utf-8" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  async function copy() {
    try {
      await navigator.clipboard.writeText(result);
      say("Copied.");
    } catch {
      // Without permission, the text is selected for the keyboard.
      getSelection().selectAllChildren(target);
      say("Press Ctrl+C to copy the selected text.");
    }
  }

  $("translate").addEventListener("click", translate);
  $("cancel").addEventListener("click", () => running?.abort());
  $("copy").addEventListener("click", copy);
  $("download").addEventListener("click", download);
  $("open").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => openFile($("file").files[0]));
  source.addEventListener("input", () => { fileName = ""; count(); });
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "Enter") translate();
    if (event.key === "Escape") running?.abort();
  });
  document.addEventListener("dragover", (event) => { event.preventDefault(); source.classList.add("drop"); });
  document.addEventListener("dragleave", () => source.classList.remove("drop"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    source.classList.remove("drop");
    openFile(event.dataTransfer.files[0]);
  });
  $("demo").addEventListener("click", async () => {
    const answer = await (await fetch("demo")).json();
    source.value = answer.text;
    $("format").value = "text";
    fileName = "";
    count();
    translate();
  });

  fetch("frontend/settings").then((response) => response.json()).then((answer) => {
    limit = answer.charLimit;
    language = answer.language.target.code;
    $("model").textContent = answer.model;
    $("source-name").textContent = answer.language.source.name;
    $("target-name").textContent = answer.language.target.name;
    source.lang = answer.language.source.code;
    target.lang = language;
    $("demo").hidden = !answer.hasDemo;
    count();
  }).catch(() => say("The server cannot be reached.", true));
})();
