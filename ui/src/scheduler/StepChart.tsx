// The batches of the newest steps as stacked bars. Arrow keys and the pointer choose a step.
import { useState } from "preact/hooks";
import { count } from "../charts/numbers";
import { ticks } from "../charts/ticks";
import { useWidth } from "../charts/useWidth";
import { barPaths, describeStep, type Step } from "./steps";

const HEIGHT = 190;
const [TOP, BOTTOM, LEFT, RIGHT] = [8, 8, 44, 8];
const PITCH = 6;

export function StepChart({ steps, numSkipped }: { steps: readonly Step[]; numSkipped: number }) {
  const [frame, width] = useWidth<HTMLDivElement>();
  const [chosen, setChosen] = useState<number | null>(null); // a step's number; null: the newest
  const numShown = Math.max(0, Math.floor((width - LEFT - RIGHT) / PITCH));
  const shown = steps.slice(-numShown || steps.length);
  const axis = ticks(Math.max(4, ...shown.map(([, prefill, decode]) => prefill + decode)), 4, true);
  const most = axis[axis.length - 1] ?? 1;
  const base = HEIGHT - BOTTOM;
  const perToken = (base - TOP) / most;
  const right = width - RIGHT;
  const { decode, prefill } = barPaths(shown, right, base, PITCH, perToken);
  const found = shown.findIndex(([number]) => number === chosen);
  const index = found >= 0 ? found : shown.length - 1;
  const step = shown[index];
  const choose = (at: number): void => {
    const clamped = Math.max(0, Math.min(shown.length - 1, at));
    setChosen(clamped === shown.length - 1 ? null : (shown[clamped]?.[0] ?? null));
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    const moves: Record<string, number> = {
      ArrowLeft: index - 1,
      ArrowRight: index + 1,
      ArrowDown: index - 1,
      ArrowUp: index + 1,
      PageDown: index - 10,
      PageUp: index + 10,
      Home: 0,
      End: shown.length - 1,
    };
    const to = moves[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
  };
  const x = right - (shown.length - index) * PITCH;
  return (
    <figure class="chart panel">
      <figcaption>
        <span class="chart-title">Tokens of each batch</span>
        <span class="chart-note">one bar per forward pass, the newest on the right</span>
        <span class="chart-newest">
          <span class="chart-key">
            <Swatch kind="prefill" /> prefill
          </span>
          <span class="chart-key">
            <Swatch kind="decode" /> decode
          </span>
        </span>
      </figcaption>
      <div
        ref={frame}
        class="chart-frame steps"
        role="slider"
        tabIndex={0}
        aria-label="Step"
        aria-orientation="horizontal"
        aria-valuemin={shown[0]?.[0] ?? 0}
        aria-valuemax={shown[shown.length - 1]?.[0] ?? 0}
        aria-valuenow={step?.[0] ?? 0}
        aria-valuetext={step === undefined ? "No steps yet." : describeStep(step)}
        onKeyDown={onKeyDown}
        onPointerMove={(event) => {
          const left = event.currentTarget.getBoundingClientRect().left;
          choose(shown.length - Math.ceil((right - (event.clientX - left)) / PITCH));
        }}
        onPointerLeave={() => setChosen(null)}
      >
        {width > 0 && (
          <svg width={width} height={HEIGHT} aria-hidden="true">
            <Hatch />
            {axis.map((value) => (
              <g key={value}>
                <line
                  class="chart-grid"
                  x1={LEFT}
                  x2={right}
                  y1={base - value * perToken}
                  y2={base - value * perToken}
                />
                <text
                  class="chart-tick"
                  x={LEFT - 6}
                  y={base - value * perToken}
                  dy="0.32em"
                  text-anchor="end"
                >
                  {count(value)}
                </text>
              </g>
            ))}
            {step !== undefined && (
              <rect class="step-chosen" x={x - 0.5} y={TOP} width={PITCH} height={base - TOP} />
            )}
            <path class="step-decode" d={decode} />
            <path class="step-prefill" d={prefill} fill="url(#step-hatch)" />
          </svg>
        )}
      </div>
      <p class="step-line">
        {step === undefined
          ? "No step since this view was opened: run a program to see its batches."
          : describeStep(step)}
        {numSkipped > 0 && ` ${count(numSkipped)} steps were too many to report.`}
      </p>
    </figure>
  );
}

function Hatch() {
  return (
    <defs>
      <pattern
        id="step-hatch"
        width="4"
        height="4"
        patternUnits="userSpaceOnUse"
        patternTransform="rotate(45)"
      >
        <rect class="hatch-ground" width="4" height="4" />
        <rect class="hatch-line" width="2" height="4" />
      </pattern>
    </defs>
  );
}

function Swatch({ kind }: { kind: "prefill" | "decode" }) {
  return (
    <svg class="step-swatch" width="14" height="12" aria-hidden="true">
      <rect
        class={`step-${kind}`}
        x="0.5"
        y="0.5"
        width="13"
        height="11"
        {...(kind === "prefill" ? { fill: "url(#step-hatch)" } : {})}
      />
    </svg>
  );
}
