// The shell: header with views, connection and theme; the view of the route; the live region.
import { signal, useSignalEffect } from "@preact/signals";
import type { ComponentType } from "preact";
import { announcements } from "./announce";
import { askForKey, KeyPrompt } from "./KeyPrompt";
import { hrefOf, route, VIEWS, type ViewName } from "./router";
import { model, models, useModel } from "./session";
import { StatusBar, StatusWord } from "./StatusBar";
import { theme, THEMES, type Theme } from "./theme";

// Each view is a file of its own. After the first one is shown the others are fetched too, so that they can be
// shown while the server is away.
const LOADERS: Record<ViewName, () => Promise<{ default: ComponentType }>> = {
  playground: () => import("../playground/PlaygroundView"),
  chat: () => import("../chat/ChatView"),
  tree: () => import("../tree/TreeView"),
  scheduler: () => import("../scheduler/SchedulerView"),
  programs: () => import("../programs/ProgramsView"),
  runs: () => import("../runs/RunsView"),
};

interface Shown {
  name: ViewName;
  Component: ComponentType;
}
const shown = signal<Shown | null>(null);
const isMissing = signal(false);

async function show(name: ViewName): Promise<void> {
  const hadOne = shown.peek() !== null;
  try {
    const { default: Component } = await LOADERS[name]();
    if (route.peek().view !== name) return;
    if (shown.peek()?.name !== name) scrollTo(0, 0);
    shown.value = { name, Component };
    isMissing.value = false;
  } catch {
    if (route.peek().view === name) isMissing.value = true;
    return;
  }
  document.title = `${VIEWS.find((view) => view.name === name)!.title} – agentflow`;
  // After a change of view, the keyboard goes on at the new heading. The view itself scrolls, if it has to.
  requestAnimationFrame(() => {
    if (hadOne) document.querySelector<HTMLElement>("main h1")?.focus({ preventScroll: true });
    else setTimeout(fetchAll);
  });
}

function fetchAll(): void {
  for (const load of Object.values(LOADERS)) void load().catch(() => undefined); // shown, the view says so
}

// A document never fetches a module again whose fetch failed, so the page has to be loaded again, once the server
// answers. The session's storage keeps the program and the chats.
async function loadAgain(): Promise<void> {
  const answer = await fetch(location.pathname, { cache: "no-store" }).catch(() => null);
  if (answer?.ok) location.reload();
}

export function App() {
  useSignalEffect(() => void show(route.value.view));
  const now = shown.value;
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        Skip to the content
      </a>
      <header class="top">
        <a class="brand" href={hrefOf("playground")}>
          <Mark />
          agentflow
        </a>
        <nav aria-label="Views">
          {VIEWS.map((view) => (
            <a
              key={view.name}
              href={hrefOf(view.name)}
              aria-current={route.value.view === view.name ? "page" : undefined}
            >
              {view.title}
            </a>
          ))}
        </nav>
        <div class="top-end">
          <StatusWord />
          <ModelChoice />
          <div class="settings">
            <ThemeChoice />
            <button type="button" class="quiet" onClick={askForKey}>
              Key
            </button>
          </div>
        </div>
      </header>
      <StatusBar />
      <main id="main" tabIndex={-1}>
        {isMissing.value && (
          <p class="empty">
            This view could not be loaded from the server.{" "}
            <button type="button" onClick={() => void loadAgain()}>
              Try again
            </button>
          </p>
        )}
        {!now && !isMissing.value && <p class="empty">Loading…</p>}
        {now && !isMissing.value && <now.Component key={now.name} />}
      </main>
      <KeyPrompt />
      <div class="visually-hidden" role="log" aria-label="Announcements" data-testid="announcer">
        {announcements.value.map(({ number, text }) => (
          <p key={number}>{text}</p>
        ))}
      </div>
    </>
  );
}

function skip(event: Event): void {
  event.preventDefault(); // the hash names the view
  document.getElementById("main")?.focus();
}

function Mark() {
  return (
    <svg class="mark" viewBox="0 0 32 32" aria-hidden="true">
      <path d="M3 16h6c5 0 5-9 11-9h9M9 16h20M9 16c5 0 5 9 11 9h9" />
    </svg>
  );
}

function ModelChoice() {
  if (models.value.length === 0) return null;
  if (models.value.length === 1) return <span class="model-name">{models.value[0]}</span>;
  return (
    <select
      aria-label="Model"
      value={model.value ?? models.value[0]}
      onChange={(event) => void useModel(event.currentTarget.value)}
    >
      {models.value.map((name) => (
        <option key={name} value={name}>
          {name}
        </option>
      ))}
    </select>
  );
}

function ThemeChoice() {
  return (
    <select
      aria-label="Theme"
      value={theme.value}
      onChange={(event) => (theme.value = event.currentTarget.value as Theme)}
    >
      {THEMES.map((name) => (
        <option key={name} value={name}>
          {name === "system" ? "System theme" : name === "light" ? "Light" : "Dark"}
        </option>
      ))}
    </select>
  );
}
