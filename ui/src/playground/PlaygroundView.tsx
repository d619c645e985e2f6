// The playground: a program as a form on one side, its run on the other.
import { signal, useComputed, useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { Dialog } from "../app/Dialog";
import { announce } from "../app/announce";
import { session } from "../app/session";
import { keepStored, stored } from "../app/stored";
import { View } from "../app/View";
import { counted } from "../charts/numbers";
import { copyText } from "../text/copy";
import { isLost, keepImages } from "../images/kept";
import { blindness } from "../images/sight";
import { EXAMPLES } from "./examples";
import { Form, NumberField } from "./Form";
import { Ledger } from "./Ledger";
import { allImages, mistakesOf, type Program, type Sampling } from "./program";
import { toPython } from "./python";
import { ProgramRun } from "./run";
import { Stage } from "./Stage";
import "./playground.css";

// They outlive the view: a run goes on while another view is shown.
const STORED = "playground 2";
const before = stored(STORED) as { readonly program: Program; readonly example: string } | undefined;
const program = signal<Program>(before?.program ?? structuredClone(EXAMPLES["essay_judge"]!));
const example = signal(before?.example ?? "essay_judge");
keepStored(
  STORED,
  () => [program.value, example.value],
  () => ({ program: program.peek(), example: example.peek() }),
);
const run = signal<ProgramRun | null>(null);
/** What choosing a ready program replaced, if it had been edited: it can be taken back until the next edit or run. */
const replaced = signal<{ program: Program; example: string; run: ProgramRun | null } | null>(null);
keepImages("playground", () =>
  [program.value, run.value?.program, replaced.value?.program, replaced.value?.run?.program].flatMap((one) =>
    one ? allImages(one) : [],
  ),
);

function start(): void {
  const open = session.peek();
  if (!open) return;
  run.peek()?.stop();
  replaced.value = null;
  announce("Running.");
  run.value = new ProgramRun(program.peek(), open);
}

function choose(name: string): void {
  const before = { program: program.peek(), example: example.peek(), run: run.peek() };
  // Of several choices in a row, as with the arrow keys, the first replaced something.
  if (JSON.stringify(before.program) !== JSON.stringify(EXAMPLES[before.example])) {
    replaced.value = before;
    announce(`${sentenceOfReplaced(before.example)} Undo is after the choice.`);
  }
  example.value = name;
  program.value = structuredClone(EXAMPLES[name]!);
  run.value = null;
}

/** Why the images of the program cannot be sent. */
function imageMistakes(): string[] {
  const images = allImages(program.value);
  const blind = images.length > 0 ? blindness(session.value) : null;
  const lost = images.filter(isLost).map(({ name }) => `${name} was lost with the reload: remove it, and add it again.`);
  return [...(blind === null ? [] : [blind]), ...lost];
}

const sentenceOfReplaced = (name: string) => `Your changes to “${EXAMPLES[name]!.title}” were replaced.`;

function undo(): void {
  const before = replaced.peek();
  if (!before) return;
  example.value = before.example;
  program.value = before.program;
  run.value = before.run;
  replaced.value = null;
  announce("Your changes are back.");
}

export default function PlaygroundView() {
  const drawer = useSignal<"sampling" | "python" | null>(null);
  const mistakes = useComputed(() => [...mistakesOf(program.value), ...imageMistakes()]);
  const isRunning = run.value?.status.value === "running";
  const hasTurns = session.value?.capabilities.roles !== false;
  const choice = useRef<HTMLSelectElement>(null);
  const edit = (changed: Program) => {
    replaced.value = null;
    program.value = changed;
  };
  return (
    <View
      name="playground"
      title="Playground"
      lead={program.value.about}
      actions={
        <>
          <select
            ref={choice}
            aria-label="Ready program"
            value={example.value}
            disabled={isRunning}
            data-testid="example"
            onChange={(event) => choose(event.currentTarget.value)}
          >
            {Object.entries(EXAMPLES).map(([name, one]) => (
              <option key={name} value={name}>
                {one.title}
              </option>
            ))}
          </select>
          {replaced.value && !isRunning && (
            <span class="replaced" data-testid="replaced">
              {sentenceOfReplaced(replaced.value.example)}
              <button
                type="button"
                onClick={() => {
                  undo();
                  choice.current?.focus();
                }}
              >
                Undo
              </button>
            </span>
          )}
          <button type="button" data-testid="sampling" onClick={() => (drawer.value = "sampling")}>
            Sampling
          </button>
          <button type="button" data-testid="python" onClick={() => (drawer.value = "python")}>
            Python
          </button>
          <RunButton isRunning={isRunning} canRun={mistakes.value.length === 0 && session.value !== null} />
          {!isRunning && <Mistake mistakes={mistakes.value} />}
        </>
      }
    >
      {!hasTurns && (
        <p class="view-note" data-testid="no-turns">
          This model has no chat template: the texts of the program follow each other without turns, with an empty line
          after each.
        </p>
      )}
      <div class="playground">
        <details class="program-side panel" open={matchMedia("(min-width: 68rem)").matches}>
          <summary>
            <h2>Program</h2>
          </summary>
          <Form program={program.value} onChange={edit} isOff={isRunning} />
          {mistakes.value.length > 0 && (
            <ul class="mistakes" data-testid="mistakes">
              {mistakes.value.map((mistake) => (
                <li key={mistake}>{mistake}</li>
              ))}
            </ul>
          )}
        </details>
        <div class="stage-side">
          {run.value ? (
            <>
              <Ledger run={run.value} />
              <Stage key={run.value.startedAt} run={run.value} />
            </>
          ) : (
            <Empty />
          )}
        </div>
      </div>
      <Dialog
        title="Sampling"
        className="drawer"
        isOpen={drawer.value === "sampling"}
        onClose={() => (drawer.value = null)}
      >
        <SamplingFields
          sampling={program.value.sampling}
          onChange={(sampling) => edit({ ...program.peek(), sampling })}
        />
      </Dialog>
      <Dialog
        title="The same program in Python"
        className="python"
        isOpen={drawer.value === "python"}
        onClose={() => (drawer.value = null)}
      >
        <pre class="source" tabIndex={0} data-testid="python-source">
          {toPython(program.value, hasTurns)}
        </pre>
        <div class="row end">
          <button
            type="button"
            class="primary"
            onClick={(event) => void copyText(toPython(program.peek(), hasTurns), event.currentTarget)}
          >
            Copy
          </button>
        </div>
      </Dialog>
    </View>
  );
}

/** One button that is Run or Stop, so that the focus stays on it. */
function RunButton({ isRunning, canRun }: { isRunning: boolean; canRun: boolean }) {
  return (
    <button
      type="button"
      class={isRunning ? "stop" : "primary"}
      data-testid={isRunning ? "stop" : "run"}
      disabled={!isRunning && !canRun}
      aria-describedby={!isRunning && !canRun ? "run-mistake" : undefined}
      onClick={() => (isRunning ? run.peek()?.stop() : start())}
    >
      {isRunning ? "Stop" : "Run"}
    </button>
  );
}

/** Why the program cannot run: beside the button, as the program may be out of sight. */
function Mistake({ mistakes }: { mistakes: readonly string[] }) {
  const [first, ...others] = mistakes;
  return (
    <p class="run-mistake" id="run-mistake" role="status" data-testid="run-mistake">
      {first}
      {others.length > 0 && ` ${counted(others.length, "more mistake")} below the program.`}
    </p>
  );
}

function Empty() {
  return (
    <div class="empty stage-empty">
      <svg viewBox="0 0 240 120" aria-hidden="true" class="empty-picture">
        {[30, 90, 150, 210].map((x) => (
          <path key={x} d={`M120 8C120 40 ${x} 34 ${x} 60S120 84 120 112`} />
        ))}
        <circle cx="120" cy="8" r="4" />
        <circle cx="120" cy="112" r="4" />
      </svg>
      <p>Run the program: its branches stream side by side from the prefix that they share.</p>
    </div>
  );
}

function SamplingFields({ sampling, onChange }: { sampling: Sampling; onChange: (sampling: Sampling) => void }) {
  return (
    <div class="sampling">
      <NumberField
        label="Temperature (0: always the likeliest token)"
        value={sampling.temperature}
        min={0}
        max={2}
        step={0.1}
        onChange={(temperature) => onChange({ ...sampling, temperature: temperature ?? 0 })}
      />
      <NumberField
        label="Top p (1: off)"
        value={sampling.topP}
        min={0.01}
        max={1}
        step={0.05}
        onChange={(topP) => onChange({ ...sampling, topP: topP ?? 1 })}
      />
      <NumberField
        label="Max tokens of a gen without its own"
        value={sampling.maxTokens}
        min={1}
        max={100_000}
        onChange={(maxTokens) => onChange({ ...sampling, maxTokens: maxTokens ?? 96 })}
      />
      <NumberField
        label="Seed (empty: another one for each run)"
        value={sampling.seed}
        min={0}
        max={2 ** 53 - 1}
        placeholder="random"
        onChange={(seed) => onChange({ ...sampling, seed })}
      />
      <p class="hint">Each branch derives its own seed from this one and its place, as the same program in Python does.</p>
    </div>
  );
}
