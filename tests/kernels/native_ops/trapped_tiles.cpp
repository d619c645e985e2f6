// The instructions of AMX on a processor that has none: each of them is an invalid instruction there, and what the
// signal then does is decode it and carry it out, as Intel's manual has it (Software Developer's Manual, volume 2,
// LDTILECFG to TILEZERO). Loaded before what is compiled for AMX, which then runs unchanged: its encodings, its
// registers, its addresses and the form it gives to tiles. What the manual forbids ends the process with a word
// about it.
#include <signal.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int NUM_TILES = 8, MAX_ROWS = 16, MAX_ROW_BYTES = 64;
constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;

std::atomic<bool> is_permitted{false};
std::atomic<long> num_products{0};

struct Tiles {
    bool are_formed = false;
    int rows[NUM_TILES] = {}, row_bytes[NUM_TILES] = {};
    unsigned char bytes[NUM_TILES][MAX_ROWS][MAX_ROW_BYTES] = {};
};
thread_local Tiles tiles;

[[noreturn]] void end(const char* why) {
    static const char PREFIX[] = "trapped tiles: ";
    (void)!write(2, PREFIX, sizeof PREFIX - 1);
    (void)!write(2, why, strlen(why));
    (void)!write(2, "\n", 1);
    abort();
}

// Of an instruction with a VEX prefix of three bytes: which it is, its registers, and where its memory is.
struct Instruction {
    int prefix, opcode, mod, reg, rm, third, length;
    int64_t address, stride;
};

int64_t value_of(const ucontext_t* at, int number) {
    constexpr int PLACES[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return at->uc_mcontext.gregs[PLACES[number]];
}

void read_memory_operand(const unsigned char* code, int extended_index, int extended_base, const ucontext_t* at,
                         Instruction& made) {
    int base = made.rm & 7, index = -1, scale = 0;
    if (base == 4) {
        const int sib = code[made.length++];
        base = sib & 7, index = (sib >> 3 & 7) | extended_index, scale = sib >> 6;
    }
    int64_t displacement = 0;
    const bool is_relative = made.mod == 0 && base == 5;  // to the next instruction, or with SIB to nothing
    if (made.mod == 1) {
        displacement = int8_t(code[made.length++]);
    } else if (made.mod == 2 || is_relative) {
        int32_t wide;
        memcpy(&wide, code + made.length, sizeof wide);
        displacement = wide;
        made.length += 4;
    }
    made.stride = index >= 0 && index != 4 ? value_of(at, index) << scale : 0;
    made.address = displacement;
    if (!is_relative) {
        made.address += value_of(at, base | extended_base);
    } else if (index < 0) {
        made.address += int64_t(code) + made.length;
    }
}

Instruction decoded(const unsigned char* code, const ucontext_t* at) {
    Instruction made{};
    if (code[0] != 0xC4 || (code[1] & 0x1F) != 2 || (code[2] & 0x84)) return made;  // map 0F38, W0, 128 bits
    made.prefix = code[2] & 3;
    made.third = ~code[2] >> 3 & 15;
    made.opcode = code[3];
    made.mod = code[4] >> 6;
    made.reg = (code[4] >> 3 & 7) | (code[1] & 0x80 ? 0 : 8);
    made.rm = (code[4] & 7);
    made.length = 5;
    if (made.mod == 3) {
        made.rm |= code[1] & 0x20 ? 0 : 8;
    } else {
        read_memory_operand(code, code[1] & 0x40 ? 0 : 8, code[1] & 0x20 ? 0 : 8, at, made);
    }
    return made;
}

void form_tiles(const unsigned char* from) {
    for (int i = 2; i < 16; i++) {
        if (from[i]) end("LDTILECFG: reserved bytes are not zero");
    }
    if (from[0] != 1 || from[1] != 0) end("LDTILECFG: not palette 1 from row 0");
    tiles = Tiles();
    tiles.are_formed = true;
    for (int i = 0; i < 16; i++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, from + 16 + 2 * i, sizeof row_bytes);
        const int rows = from[48 + i];
        if (i >= NUM_TILES) {
            // The manual reserves what stands behind the eight tiles of palette 1.
            if (row_bytes || rows) end("LDTILECFG: a tile past the eighth has a form");
            continue;
        }
        if (rows > MAX_ROWS || row_bytes > MAX_ROW_BYTES || !rows != !row_bytes) end("LDTILECFG: a tile's form");
        tiles.rows[i] = rows, tiles.row_bytes[i] = row_bytes;
    }
}

void check(int tile) {
    if (!tiles.are_formed || tile >= NUM_TILES || !tiles.rows[tile]) end("a tile that has no form is used");
}

void load(const Instruction& what) {
    check(what.reg);
    memset(tiles.bytes[what.reg], 0, sizeof tiles.bytes[0]);
    for (int i = 0; i < tiles.rows[what.reg]; i++) {
        memcpy(tiles.bytes[what.reg][i], reinterpret_cast<void*>(what.address + i * what.stride),
               tiles.row_bytes[what.reg]);
    }
}

void store(const Instruction& what) {
    check(what.reg);
    for (int i = 0; i < tiles.rows[what.reg]; i++) {
        memcpy(reinterpret_cast<void*>(what.address + i * what.stride), tiles.bytes[what.reg][i],
               tiles.row_bytes[what.reg]);
    }
}

// TDPBF16PS: the even and the odd products are summed apart, then together, then onto the sums (no subnormals).
void multiply(int sums, int left, int right) {
    check(sums), check(left), check(right);
    if (sums == left || sums == right || left == right) end("TDPBF16PS: one tile twice");
    if (tiles.rows[sums] != tiles.rows[left] || tiles.row_bytes[sums] != tiles.row_bytes[right] ||
        tiles.row_bytes[left] != 4 * tiles.rows[right]) {
        end("TDPBF16PS: forms that do not fit");
    }
    num_products++;
    const int columns = tiles.row_bytes[sums] / 4;
    for (int m = 0; m < tiles.rows[sums]; m++) {
        float even[MAX_ROWS] = {}, odd[MAX_ROWS] = {}, total[MAX_ROWS];
        uint32_t row[MAX_ROWS], pairs[MAX_ROWS];
        memcpy(row, tiles.bytes[left][m], sizeof row);
        for (int k = 0; k < tiles.rows[right]; k++) {
            memcpy(pairs, tiles.bytes[right][k], sizeof pairs);
            const uint32_t low = row[k] << 16, high = row[k] & 0xFFFF0000u;
            float first, second;
            memcpy(&first, &low, 4), memcpy(&second, &high, 4);
            for (int n = 0; n < columns; n++) {
                const uint32_t low_n = pairs[n] << 16, high_n = pairs[n] & 0xFFFF0000u;
                float first_n, second_n;
                memcpy(&first_n, &low_n, 4), memcpy(&second_n, &high_n, 4);
                even[n] += first * first_n;
                odd[n] += second * second_n;
            }
        }
        memcpy(total, tiles.bytes[sums][m], sizeof total);
        for (int n = 0; n < columns; n++) total[n] += even[n] + odd[n];
        memcpy(tiles.bytes[sums][m], total, 4 * columns);
    }
}

// Whether it is one of the instructions of AMX; then it has been carried out.
bool carry_out(const Instruction& what) {
    enum { NONE, X66, XF3, XF2 };
    const bool is_memory = what.mod != 3;
    if (what.opcode == 0x49 && what.prefix == NONE && is_memory && what.reg == 0) {
        form_tiles(reinterpret_cast<unsigned char*>(what.address));
    } else if (what.opcode == 0x49 && what.prefix == NONE && what.reg == 0 && what.rm == 0) {
        tiles = Tiles();
    } else if (what.opcode == 0x49 && what.prefix == XF2 && !is_memory && what.rm == 0) {
        check(what.reg);
        memset(tiles.bytes[what.reg], 0, sizeof tiles.bytes[0]);
    } else if (what.opcode == 0x4B && (what.prefix == XF2 || what.prefix == X66) && is_memory) {
        load(what);
    } else if (what.opcode == 0x4B && what.prefix == XF3 && is_memory) {
        store(what);
    } else if (what.opcode == 0x5C && what.prefix == XF3 && !is_memory) {
        multiply(what.reg, what.rm, what.third);
    } else {
        return false;
    }
    return true;
}

void on_invalid_instruction(int, siginfo_t*, void* context) {
    auto* at = static_cast<ucontext_t*>(context);
    const auto* code = reinterpret_cast<const unsigned char*>(at->uc_mcontext.gregs[REG_RIP]);
    Instruction what = decoded(code, at);
    if (what.length && !is_permitted) end("tiles are used without the right to");
    if (!what.length || !carry_out(what)) {
        char why[100];
        int used = snprintf(why, sizeof why, "an invalid instruction that is none of AMX:");
        for (int i = 0; i < 12; i++) used += snprintf(why + used, sizeof why - used, " %02x", code[i]);
        end(why);
    }
    // A signal takes longer than most of what it carries out: those that follow are carried out as well.
    do {
        code += what.length;
        at->uc_mcontext.gregs[REG_RIP] = int64_t(code);
        what = decoded(code, at);
    } while (what.length && carry_out(what));
}

__attribute__((constructor)) void begin() {
    struct sigaction action = {};
    action.sa_sigaction = on_invalid_instruction;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
}

}  // namespace

// The products that have been carried out.
extern "C" long trapped_products() { return num_products; }

// In place of the C library's: the right to use tiles is given, all else goes where it would have gone.
extern "C" long trapped_syscall(long number, ...) {
    long values[6];
    va_list list;
    va_start(list, number);
    for (long& value : values) value = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && values[0] == REQUEST_PERMISSION) {
        is_permitted = values[1] == TILE_DATA;
        return is_permitted ? 0 : -1;
    }
    return syscall(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}
