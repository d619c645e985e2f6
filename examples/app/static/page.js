// Shows the events of /discuss: one column for each branch, and the summary. A model's text is only ever set as
// text, never as markup.

const form = document.getElementById("form");
const question = document.getElementById("question");
const ask = document.getElementById("ask");
const stop = document.getElementById("stop");
const status = document.getElementById("status");
const summary = document.getElementById("summary");

const names = await (await fetch("views")).json();
const columns = names.map((name) => {
  const section = document.createElement("section");
  const heading = document.createElement("h2");
  const text = document.createElement("p");
  heading.textContent = name[0].toUpperCase() + name.slice(1);
  text.className = "text";
  section.append(heading, text);
  document.getElementById("views").append(section);
  return text;
});

let running = null;

function end(sentence) {
  running?.close(); // cancels the program on the server, if it still runs
  running = null;
  ask.disabled = false;
  stop.disabled = true;
  status.textContent = sentence;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  for (const text of [...columns, summary]) text.textContent = "";
  ask.disabled = true;
  stop.disabled = false;
  status.textContent = "The server answers.";
  const source = (running = new EventSource(`discuss?${new URLSearchParams({ question: question.value })}`));
  source.addEventListener("message", ({ data }) => {
    const { path, text } = JSON.parse(data);
    (path.length ? columns[path[0]] : summary).append(text);
  });
  source.addEventListener("done", () => end("The answers are complete."));
  source.addEventListener("error", ({ data }) => {
    // With data: an event of the server. Without: the connection failed; asking again would be another run.
    end(data ? `The server reports: ${JSON.parse(data)}` : "The server cannot be reached. Ask again.");
  });
});

stop.addEventListener("click", () => end("Stopped."));
