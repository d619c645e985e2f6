// A program as the form holds it: plain data, from which the graph and the Python source are made.
//
// Texts may refer to earlier variables as "{name}": of the same lane, or of the one that it was forked from.
import type { ShownImage } from "../images/picture";

export interface Sampling {
  temperature: number;
  topP: number;
  /** Of a gen that has no maximum of its own. */
  maxTokens: number;
  /** Null: another one for each run. */
  seed: number | null;
}

/** What a gen's text has to be: free, or JSON under a schema, or a match of a pattern. */
export type Shape = { kind: "free" } | { kind: "schema"; source: string } | { kind: "regex"; source: string };

export interface SayStep {
  kind: "say";
  role: "user" | "assistant";
  text: string;
  /** Of a turn of the user: they stand before its text. */
  images?: readonly ShownImage[];
}

export interface GenStep {
  kind: "gen";
  name: string;
  /** The assistant's turn begins with this text. */
  lead: string;
  maxTokens: number | null;
  stop: string[];
  shape: Shape;
}

export interface SelectStep {
  kind: "select";
  name: string;
  lead: string;
  choices: string[];
}

export interface Branch {
  label: string;
  /** The user's turn with which the branch begins; empty: none. */
  instruction: string;
}

/** Every branch says its own instruction and then takes the same steps. */
export interface ForkStep {
  kind: "fork";
  branches: Branch[];
  steps: Step[];
}

/** A user's turn with the last value of each branch of the fork before it. */
export interface JoinStep {
  kind: "join";
  before: string;
  after: string;
}

export type Step = SayStep | GenStep | SelectStep | ForkStep | JoinStep;

export interface Program {
  title: string;
  /** One sentence about the idea. */
  about: string;
  system: string;
  user: string;
  /** Before the text of `user`. */
  images?: readonly ShownImage[];
  steps: Step[];
  sampling: Sampling;
}

export const DEFAULT_SAMPLING: Sampling = { temperature: 0, topP: 1, maxTokens: 96, seed: 1 };

export const gen = (name: string, options: Partial<Omit<GenStep, "kind" | "name">> = {}): GenStep => ({
  kind: "gen",
  name,
  lead: "",
  maxTokens: null,
  stop: [],
  shape: { kind: "free" },
  ...options,
});

export const select = (name: string, choices: string[], lead = ""): SelectStep => ({
  kind: "select",
  name,
  lead,
  choices,
});

export const say = (text: string, role: SayStep["role"] = "user"): SayStep => ({ kind: "say", role, text });

export const MAX_BRANCHES = 256;

/** The images of a turn of the user; other turns have none. */
export const imagesOf = (step: SayStep): readonly ShownImage[] => (step.role === "user" ? (step.images ?? []) : []);

/** All images of the program. */
export function allImages({ images = [], steps }: Pick<Program, "images" | "steps">): ShownImage[] {
  const inner = steps.flatMap((step) =>
    step.kind === "say" ? imagesOf(step) : step.kind === "fork" ? allImages({ steps: step.steps }) : [],
  );
  return [...images, ...inner];
}

const hasUser = ({ user, images = [] }: Program) => user.trim() !== "" || images.length > 0;

/** A sentence for each mistake that would keep the program from running, with the place it stands at. */
export function mistakesOf(program: Program): string[] {
  const found: string[] = [];
  check(program.steps, "", new Set(), found, hasUser(program) || program.system.trim() ? "user" : null);
  if (!program.steps.some((step) => step.kind !== "say")) found.push("The program generates nothing: add a step.");
  return found;
}

function check(steps: Step[], place: string, names: Set<string>, found: string[], before: string | null): void {
  let last = before; // the role of the turn before
  let fork: ForkStep | null = null;
  steps.forEach((step, index) => {
    const where = `Step ${place}${index + 1}`;
    switch (step.kind) {
      case "say":
        if (!step.text.trim() && imagesOf(step).length === 0) found.push(`${where} has no text.`);
        last = step.role;
        break;
      case "gen":
      case "select":
        if (!/^[A-Za-z_][A-Za-z0-9_]*$/.test(step.name)) {
          found.push(`${where} needs a name of letters, digits and underscores.`);
        } else if (names.has(step.name)) found.push(`${where}: the name ${step.name} is taken.`);
        names.add(step.name);
        if (last === "assistant") {
          found.push(`${where} follows the assistant's turn: put a turn of the user before it.`);
        }
        if (step.kind === "select") {
          const choices = step.choices.filter((choice) => choice !== "");
          if (choices.length < 2) found.push(`${where} needs at least two choices.`);
          if (new Set(choices).size !== choices.length) found.push(`${where} has a choice twice.`);
        } else if (step.shape.kind === "schema" && schemaOf(step.shape.source) === null) {
          found.push(`${where}: the schema is ${schemaFault(step.shape.source)}.`);
        } else if (step.shape.kind === "regex" && !step.shape.source) {
          found.push(`${where} has no pattern.`);
        }
        last = "assistant";
        break;
      case "fork": {
        if (step.branches.length < 1) found.push(`${where} has no branches.`);
        if (step.branches.length > MAX_BRANCHES) found.push(`${where} has more than ${MAX_BRANCHES} branches.`);
        if (!step.steps.some((one) => one.kind !== "say")) {
          found.push(`${where}: the branches generate nothing.`);
        }
        const starts = step.branches.every((branch) => branch.instruction.trim()) ? "user" : last;
        check(step.steps, `${place}${index + 1}.`, new Set(names), found, starts);
        fork = step;
        break;
      }
      case "join":
        if (fork === null) found.push(`${where} joins nothing: it must come after a fork.`);
        fork = null;
        last = "user";
        break;
    }
  });
}

/** The JSON object in the source of a schema, or null. */
export function schemaOf(source: string): Record<string, unknown> | null {
  try {
    const found: unknown = JSON.parse(source);
    return typeof found === "object" && found !== null && !Array.isArray(found)
      ? (found as Record<string, unknown>)
      : null;
  } catch {
    return null;
  }
}

/** What is wrong with a schema that `schemaOf` cannot read. */
function schemaFault(source: string): string {
  try {
    JSON.parse(source);
    return "not a JSON object";
  } catch (error) {
    return `no JSON (${error instanceof Error ? error.message : String(error)})`;
  }
}

/** The pieces of a text: literal ones, and the names of variables in scope that stand in braces. */
export function piecesOf(text: string, scope: ReadonlySet<string>): (string | { name: string })[] {
  const pieces: (string | { name: string })[] = [];
  let end = 0;
  for (const match of text.matchAll(/\{([A-Za-z_][A-Za-z0-9_]*)\}/g)) {
    if (!scope.has(match[1]!)) continue;
    if (match.index > end) pieces.push(text.slice(end, match.index));
    pieces.push({ name: match[1]! });
    end = match.index + match[0].length;
  }
  if (end < text.length) pieces.push(text.slice(end));
  return pieces;
}

/** The name of the value that a branch hands to a join: of its last gen or select. */
export function resultOf(fork: ForkStep): string | null {
  return fork.steps.findLast((step) => step.kind === "gen" || step.kind === "select")?.name ?? null;
}
