// The program as a form. Every change makes a new program; nothing is kept in the fields themselves.
import type { ComponentChildren } from "preact";
import { focusNext } from "../app/focus";
import { typedNumber } from "../app/typedNumber";
import { ImageArea } from "../images/ImageArea";
import {
  gen,
  MAX_BRANCHES,
  say,
  select,
  type Branch,
  type ForkStep,
  type GenStep,
  type JoinStep,
  type Program,
  type SayStep,
  type SelectStep,
  type Shape,
  type Step,
} from "./program";

export function Form(props: { program: Program; onChange: (program: Program) => void; isOff: boolean }) {
  const { program, onChange } = props;
  return (
    <form class="program" onSubmit={(event) => event.preventDefault()} aria-label="Program">
      <fieldset disabled={props.isOff}>
        <Area label="System" value={program.system} rows={2} onChange={(system) => onChange({ ...program, system })} />
        <ImageArea
          label="the user's turn"
          images={program.images ?? []}
          onChange={(images) => onChange({ ...program, images })}
          isOff={props.isOff}
          isPageWide
        >
          <Area label="User" value={program.user} rows={4} onChange={(user) => onChange({ ...program, user })} />
        </ImageArea>
        <Steps steps={program.steps} place="" onChange={(steps) => onChange({ ...program, steps })} />
      </fieldset>
    </form>
  );
}

const button = (label: string): string => `button[aria-label="${label}"]`;

function Steps(props: { steps: Step[]; place: string; onChange: (steps: Step[]) => void }) {
  const { steps, place, onChange } = props;
  const replace = (index: number, ...by: Step[]) => onChange(steps.toSpliced(index, 1, ...by));
  const move = (index: number, by: number) => {
    const moved = steps.toSpliced(index, 1);
    moved.splice(index + by, 0, steps[index]!);
    onChange(moved);
    const [up, down] = ["up", "down"].map((way) => button(`Move step ${place}${index + by + 1} ${way}`));
    focusNext(...(by < 0 ? [up!, down!] : [down!, up!]));
  };
  const remove = (index: number) => {
    replace(index);
    focusNext(button(`Remove step ${place}${index + 1}`), button(`Remove step ${place}${index}`), ".add-step button");
  };
  return (
    <>
      <ol class="steps">
        {steps.map((step, index) => {
          const name = `step ${place}${index + 1}`;
          return (
            <li key={index} class={`step is-${step.kind}`}>
              <header class="step-head">
                <h3>
                  <span class="step-number">
                    {place}
                    {index + 1}
                  </span>{" "}
                  {TITLES[step.kind]}
                </h3>
                <div class="step-tools">
                  <Tool label={`Move ${name} up`} sign="↑" isOff={index === 0} run={() => move(index, -1)} />
                  <Tool label={`Move ${name} down`} sign="↓" isOff={index === steps.length - 1} run={() => move(index, 1)} />
                  <Tool label={`Remove ${name}`} sign="×" run={() => remove(index)} />
                </div>
              </header>
              <StepFields step={step} place={`${place}${index + 1}.`} onChange={(changed) => replace(index, changed)} />
            </li>
          );
        })}
      </ol>
      <div class="row add-step" role="group" aria-label={place ? `Add a step to ${place}` : "Add a step"}>
        <span class="hint">Add</span>
        {(Object.keys(TITLES) as Step["kind"][]).map((kind) =>
          place && kind === "join" ? null : (
            <button key={kind} type="button" class="small" onClick={() => onChange([...steps, newStep(kind, steps)])}>
              {kind}
            </button>
          ),
        )}
      </div>
    </>
  );
}

const TITLES: Record<Step["kind"], string> = {
  say: "Turn",
  gen: "Generate",
  select: "Select",
  fork: "Fork",
  join: "Join",
};

function newStep(kind: Step["kind"], steps: readonly Step[]): Step {
  const taken = new Set(steps.flatMap((step) => ("name" in step ? [step.name] : [])));
  const free = (name: string): string => {
    let number = 1;
    while (taken.has(number === 1 ? name : `${name}${number}`)) number++;
    return number === 1 ? name : `${name}${number}`;
  };
  switch (kind) {
    case "say":
      return say("");
    case "gen":
      return gen(free("answer"));
    case "select":
      return select(free("choice"), ["yes", "no"]);
    case "join":
      return { kind, before: "These are the answers:", after: "" };
    case "fork":
      return {
        kind,
        branches: [
          { label: "one", instruction: "" },
          { label: "two", instruction: "" },
        ],
        steps: [gen(free("thought"))],
      };
  }
}

function Tool(props: { label: string; sign: string; isOff?: boolean; run: () => void }) {
  return (
    <button type="button" class="quiet tool" aria-label={props.label} disabled={props.isOff ?? false} onClick={props.run}>
      {props.sign}
    </button>
  );
}

function StepFields({ step, place, onChange }: { step: Step; place: string; onChange: (step: Step) => void }) {
  switch (step.kind) {
    case "say":
      return <SayFields step={step} place={place.slice(0, -1)} onChange={onChange} />;
    case "gen":
      return <GenFields step={step} onChange={onChange} />;
    case "select":
      return <SelectFields step={step} onChange={onChange} />;
    case "fork":
      return <ForkFields step={step} place={place} onChange={onChange} />;
    case "join":
      return <JoinFields step={step} onChange={onChange} />;
  }
}

function SayFields({ step, place, onChange }: { step: SayStep; place: string; onChange: (step: Step) => void }) {
  const area = <Area label="Text" value={step.text} rows={2} onChange={(text) => onChange({ ...step, text })} />;
  return (
    <>
      <Choice
        label="Role"
        value={step.role}
        options={{ user: "user", assistant: "assistant" }}
        onChange={(role) => onChange({ ...step, role: role as SayStep["role"] })}
      />
      {step.role === "user" ? (
        <ImageArea
          label={`step ${place}`}
          images={step.images ?? []}
          onChange={(images) => onChange({ ...step, images })}
        >
          {area}
        </ImageArea>
      ) : (
        area
      )}
    </>
  );
}

function GenFields({ step, onChange }: { step: GenStep; onChange: (step: Step) => void }) {
  const shapes: Record<Shape["kind"], Shape> = {
    free: { kind: "free" },
    schema: { kind: "schema", source: '{"type": "object", "properties": {}}' },
    regex: { kind: "regex", source: "[0-9]+" },
  };
  return (
    <>
      <div class="field-row">
        <Line label="Name" value={step.name} onChange={(name) => onChange({ ...step, name })} />
        <NumberField
          label="Max tokens"
          value={step.maxTokens}
          min={1}
          max={100_000}
          onChange={(maxTokens) => onChange({ ...step, maxTokens })}
        />
      </div>
      <Line label="Begins with" value={step.lead} onChange={(lead) => onChange({ ...step, lead })} />
      <div class="field-row">
        <Choice
          label="Form"
          value={step.shape.kind}
          options={{ free: "free text", schema: "JSON schema", regex: "pattern" }}
          onChange={(kind) => onChange({ ...step, shape: shapes[kind as Shape["kind"]] })}
        />
        <Line
          label="Stops at"
          hint="one or more, separated by spaces; \n is a line's end"
          value={step.stop.map(shownStop).join(" ")}
          onChange={(source) => onChange({ ...step, stop: source.split(/ +/).filter(Boolean).map(readStop) })}
        />
      </div>
      {step.shape.kind !== "free" && (
        <Area
          label={step.shape.kind === "schema" ? "JSON schema" : "Pattern"}
          value={step.shape.source}
          rows={step.shape.kind === "schema" ? 6 : 1}
          isCode
          onChange={(source) => onChange({ ...step, shape: { ...step.shape, source } as Shape })}
        />
      )}
    </>
  );
}

const shownStop = (stop: string) => stop.replaceAll("\n", "\\n").replaceAll(" ", "\\s");
const readStop = (shown: string) => shown.replaceAll("\\n", "\n").replaceAll("\\s", " ");

function SelectFields({ step, onChange }: { step: SelectStep; onChange: (step: Step) => void }) {
  return (
    <>
      <Line label="Name" value={step.name} onChange={(name) => onChange({ ...step, name })} />
      <Line label="Begins with" value={step.lead} onChange={(lead) => onChange({ ...step, lead })} />
      <Area
        label="Choices, one a line"
        value={step.choices.join("\n")}
        rows={Math.min(6, Math.max(2, step.choices.length))}
        onChange={(text) => onChange({ ...step, choices: text.split("\n") })}
      />
    </>
  );
}

function ForkFields({ step, place, onChange }: { step: ForkStep; place: string; onChange: (step: Step) => void }) {
  const { branches } = step;
  const resize = (count: number | null) => {
    const wanted = count ?? branches.length;
    const added = Array.from({ length: Math.max(0, wanted - branches.length) }, (_, index) => ({
      label: `branch ${branches.length + index + 1}`,
      instruction: branches.at(-1)?.instruction ?? "",
    }));
    onChange({ ...step, branches: [...branches.slice(0, wanted), ...added] });
  };
  const replace = (index: number, branch: Branch) => onChange({ ...step, branches: branches.with(index, branch) });
  return (
    <>
      <NumberField label="Branches" value={branches.length} min={1} max={MAX_BRANCHES} onChange={resize} />
      <details class="branch-list" open={branches.length <= 8}>
        <summary>Instructions</summary>
        <ol>
          {branches.map((branch, index) => (
            <li key={index}>
              <input
                aria-label={`Label of branch ${index + 1}`}
                value={branch.label}
                onInput={(event) => replace(index, { ...branch, label: event.currentTarget.value })}
              />
              <textarea
                aria-label={`Instruction of branch ${index + 1}`}
                rows={2}
                value={branch.instruction}
                placeholder="No turn of its own"
                onInput={(event) => replace(index, { ...branch, instruction: event.currentTarget.value })}
              />
            </li>
          ))}
        </ol>
      </details>
      <p class="hint">Each branch then takes these steps:</p>
      <Steps steps={step.steps} place={place} onChange={(steps) => onChange({ ...step, steps })} />
    </>
  );
}

function JoinFields({ step, onChange }: { step: JoinStep; onChange: (step: Step) => void }) {
  return (
    <>
      <p class="hint">A turn of the user with what each branch found:</p>
      <Area label="Before it" value={step.before} rows={1} onChange={(before) => onChange({ ...step, before })} />
      <Area label="After it" value={step.after} rows={2} onChange={(after) => onChange({ ...step, after })} />
    </>
  );
}

// Fields

export function Field(props: { label: string; hint?: string; children: ComponentChildren }) {
  return (
    <label class="field">
      <span>{props.label}</span>
      {props.children}
      {props.hint && <small class="hint">{props.hint}</small>}
    </label>
  );
}

function Area(props: { label: string; value: string; rows: number; isCode?: boolean; onChange: (text: string) => void }) {
  return (
    <Field label={props.label}>
      <textarea
        class={props.isCode ? "code" : ""}
        rows={props.rows}
        spellcheck={!props.isCode}
        value={props.value}
        onInput={(event) => props.onChange(event.currentTarget.value)}
      />
    </Field>
  );
}

function Line(props: { label: string; hint?: string; value: string; onChange: (text: string) => void }) {
  return (
    <Field label={props.label} {...(props.hint ? { hint: props.hint } : {})}>
      <input type="text" dir="auto" value={props.value} onChange={(event) => props.onChange(event.currentTarget.value)} />
    </Field>
  );
}

export function NumberField(props: {
  label: string;
  value: number | null;
  min: number;
  max: number;
  step?: number;
  placeholder?: string;
  onChange: (value: number | null) => void;
}) {
  return (
    <Field label={props.label}>
      <input
        type="number"
        min={props.min}
        max={props.max}
        step={props.step ?? 1}
        placeholder={props.placeholder ?? "default"}
        value={props.value ?? ""}
        onChange={(event) => props.onChange(typedNumber(event.currentTarget))}
      />
    </Field>
  );
}

function Choice(props: {
  label: string;
  value: string;
  options: Record<string, string>;
  onChange: (value: string) => void;
}) {
  return (
    <Field label={props.label}>
      <select value={props.value} onChange={(event) => props.onChange(event.currentTarget.value)}>
        {Object.entries(props.options).map(([value, label]) => (
          <option key={value} value={value}>
            {label}
          </option>
        ))}
      </select>
    </Field>
  );
}
