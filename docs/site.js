// Four parts: what helps the keyboard, the questions of the guide, chapter 7's playground, and the front page's run.

// For the keyboard and for screen readers: whatever scrolls sideways can be focused, so that the arrow keys move it; each
// code block's buttons have a name of their own; and the menu of a narrow screen opens with Enter, as the theme's other
// labels do.
function mendPage() {
  for (const part of document.querySelectorAll(".md-typeset :is(pre > code, p:has(> img), .md-typeset__scrollwrap)")) {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
  }
  const buttons = document.querySelectorAll(".md-code__nav");
  buttons.forEach((nav, i) => nav.setAttribute("aria-label", `Code block ${i + 1}`));
  const menu = document.querySelector("label.md-header__button[for=__drawer]");
  menu.tabIndex = 0;
  const icon = menu.querySelector("svg");
  icon.setAttribute("role", "img");
  icon.setAttribute("aria-label", "Menu");
}
addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.getElementById("__drawer").checked = false;
});

// A question's options can be chosen, and each has its own line of explanation: it is that of the answer, which stays
// below. Without this script the answer unfolds.
function makeQuizzes() {
  const answers = [...document.querySelectorAll(".md-typeset details")]
    .filter((part) => part.querySelector("summary").textContent === "Answer" && part.previousElementSibling.matches("ul"));
  answers.forEach((answer, number) => {
    const text = answer.querySelector("p").textContent.replace(/\s+/g, " ");
    const right = text[1];
    const about = new Map([[right, "Right. " + text.slice(4).split(/Not \(\w\): /)[0].trim()]]);
    for (const [, letter, words] of text.matchAll(/Not \((\w)\): (.*?)(?= Not \(|$)/g)) about.set(letter, "No: " + words);
    const list = answer.previousElementSibling;
    const said = document.createElement("p");
    said.className = "said";
    said.setAttribute("role", "status");
    list.classList.add("quiz");
    list.setAttribute("role", "radiogroup");
    list.setAttribute("aria-label", `Question ${number + 1}`);
    for (const item of list.children) {
      const letter = item.textContent.trim()[1];
      const label = document.createElement("label");
      const choice = document.createElement("input");
      choice.type = "radio";
      choice.name = `question-${number}`;
      choice.addEventListener("change", () => {
        said.textContent = about.get(letter);
        said.classList.toggle("right", letter === right);
      });
      label.append(choice, ...item.childNodes);
      item.setAttribute("role", "presentation");
      item.append(label);
    }
    list.after(said);
  });
}

// Temperature and filters over the probabilities that the built-in model gave once: the rules are those of ops/sample.py.
const SHOWN = 12;
const SLIDERS = [
  ["temperature", 0, 2, 0.05, 1], ["top-k", 1, 50, 1, 50], ["top-p", 0.05, 1, 0.05, 1], ["min-p", 0, 0.5, 0.01, 0],
];

// Returns the probability of each token, given their log-probabilities from the likeliest on; 0 if a filter drops it.
function filterTokens(logprobs, { temperature, "top-k": topK, "top-p": topP, "min-p": minP }) {
  if (temperature === 0) return logprobs.map((_, i) => (i === 0 ? 1 : 0));
  const share = (weights) => {
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return weights.map((weight) => weight / sum);
  };
  const weights = logprobs.map((logprob) => Math.exp((logprob - logprobs[0]) / temperature));
  const kept = share(weights.map((weight, i) => (i < topK ? weight : 0)));
  let before = 0;
  return share(kept.map((probability) => {
    const stays = before < topP && probability >= minP * kept[0];
    before += probability;
    return stays ? probability : 0;
  }));
}

function makePlayground() {
  const place = document.getElementById("playground");
  if (!place) return;
  const rows = JSON.parse(document.getElementById("logits").textContent);
  const logprobs = rows.map(([, logprob]) => logprob);
  const make = (tag, parent, className = "") => {
    const part = document.createElement(tag);
    part.className = className;
    parent.append(part);
    return part;
  };
  make("p", place).textContent = "Move the sliders: these are the tokens after “tell me a story about”.";
  const controls = make("div", place, "sliders");
  const inputs = new Map();
  for (const [name, min, max, step, value] of SLIDERS) {
    const label = make("label", controls);
    const shown = make("b", label);
    const input = make("input", label);
    Object.assign(input, { type: "range", min, max, step, value });
    input.setAttribute("aria-label", name);
    input.addEventListener("input", show);
    inputs.set(name, [input, shown]);
  }
  const bars = make("ol", place, "bars");
  const lines = rows.slice(0, SHOWN).map(([text]) => {
    const line = make("li", bars);
    make("code", line).textContent = text.replaceAll(" ", "␣").replaceAll("\n", "⏎");
    return { bar: make("i", line), number: make("span", line) };
  });
  const rest = make("p", place);
  rest.setAttribute("role", "status");
  function show() {
    const settings = {};
    for (const [name, [input, shown]] of inputs) {
      settings[name] = Number(input.value);
      shown.textContent = `${name} ${input.value}`;
    }
    const found = filterTokens(logprobs, settings);
    lines.forEach(({ bar, number }, i) => {
      bar.style.width = `${60 * found[i]}%`;
      number.textContent = found[i] ? `${(100 * found[i]).toFixed(1)} %` : "dropped";
    });
    const left = found.filter((probability) => probability > 0).length;
    const others = found.slice(SHOWN).reduce((sum, probability) => sum + probability, 0);
    rest.textContent = `${left} of ${rows.length} tokens can be drawn; those that are not shown have ${(100 * others).toFixed(1)} %.`;
  }
  show();
}

// The picture of a run: its page has one step, and the data of all (docs/motion.py). It moves unless the reader's system
// asks for less motion, and a button stops it.
function moveRun() {
  const figure = document.getElementById("motion");
  if (!figure) return;
  const run = JSON.parse(figure.querySelector("script").textContent);
  const cells = figure.querySelectorAll(".blocks i");
  const places = figure.querySelectorAll("li");
  const button = figure.querySelector("button");
  let step = run.still;
  let timer = null;
  function show() {
    const { blocks, answers } = run.frames[step];
    cells.forEach((cell, i) => { cell.dataset.block = blocks[i]; });
    places.forEach((place, i) => {
      const request = run.answers[answers[i]] ?? { question: "", answer: [] };
      place.dataset.block = answers[i] === null ? "b" : answers[i] % run.colours;
      place.firstElementChild.textContent = request.question;
      const texts = request.answer.filter(([from]) => from <= step).map(([, text]) => text);
      place.querySelector("span").textContent = texts.join("");
    });
    figure.querySelector(".later").setAttribute("x", step + 1);
    figure.querySelector("span.step").textContent = run.captions[step];
  }
  function goOn() {
    step = (step + 1) % run.frames.length;
    show();
  }
  function turn() {
    if (timer === null) {
      timer = setInterval(goOn, 150);
    } else {
      clearInterval(timer);
      timer = null;
    }
    button.textContent = timer === null ? "Play" : "Pause";
  }
  button.hidden = false;
  button.addEventListener("click", turn);
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) turn();
}

addEventListener("load", makeQuizzes);
addEventListener("load", moveRun);
addEventListener("load", makePlayground);
// The page changes its size with the window, and when an answer unfolds. Its observer is told after the new layout.
addEventListener("load", () => new ResizeObserver(mendPage).observe(document.body));
