/* ---- The loader of bundles. POSIX: files are read with pread. */
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Memory that is freed at once. */

typedef struct fk_chunk {
    struct fk_chunk *next;
} fk_chunk;

typedef struct {
    fk_chunk *chunks;
} fk_arena;

/* Zeroed memory for `count` items of `size` bytes; NULL where there is none. */
static void *fk_take(fk_arena *arena, size_t count, size_t size) {
    enum { head = 16 }; /* keeps what follows aligned */
    fk_chunk *chunk;
    if (count != 0 && size > (SIZE_MAX - head) / count) return NULL;
    chunk = (fk_chunk *)calloc(1, head + count * size);
    if (chunk == NULL) return NULL;
    chunk->next = arena->chunks;
    arena->chunks = chunk;
    return (unsigned char *)chunk + head;
}

static void fk_drop(fk_arena *arena) {
    while (arena->chunks != NULL) {
        fk_chunk *chunk = arena->chunks;
        arena->chunks = chunk->next;
        free(chunk);
    }
}

/* ---- Canonical JSON, the form of every document in a bundle: ASCII, no white space, keys sorted, each once.
 * `fk_json_check` looks at a text once and whole; everything below it walks over checked text, in place. */

enum { FK_MOST_DEPTH = 64 };

typedef struct { /* one value */
    const char *at, *end;
} fk_json;

static int fk_is_digit(char letter) { return letter >= '0' && letter <= '9'; }

static int fk_hex(char letter) {
    if (fk_is_digit(letter)) return letter - '0';
    return letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
}

/* Each of these returns the end of what begins at `at`, or NULL where it is not well-formed. */

static const char *fk_scan_string(const char *at, const char *end) {
    for (++at; at < end; ++at) {
        unsigned code = 0;
        int index;
        if (*at == '"') return at + 1;
        if (*at < ' ' || *at > '~') return NULL; /* also bytes beyond ASCII, whatever the sign of char */
        if (*at != '\\') continue;
        if (++at == end) return NULL;
        if (*at != 'u') {
            if (memchr("\"\\nrtbf", *at, 7) == NULL) return NULL;
            continue;
        }
        if (end - at < 5) return NULL;
        for (index = 1; index < 5; ++index) {
            int digit = fk_hex(at[index]);
            if (digit < 0) return NULL;
            code = code << 4 | (unsigned)digit;
        }
        /* What can be written without an escape, or with a shorter one, is. */
        if ((code >= ' ' && code <= '~') || (code >= 8 && code <= 13 && code != 11)) return NULL;
        at += 4;
    }
    return NULL;
}

static const char *fk_scan_digits(const char *at, const char *end) {
    const char *start = at;
    while (at < end && fk_is_digit(*at)) ++at;
    return at == start ? NULL : at;
}

static const char *fk_scan_number(const char *at, const char *end) {
    int negative = *at == '-', whole = 1;
    const char *first = at + negative;
    at = fk_scan_digits(first, end);
    if (at == NULL || (*first == '0' && at - first > 1)) return NULL;
    if (at < end && *at == '.') {
        whole = 0;
        at = fk_scan_digits(at + 1, end);
        if (at == NULL) return NULL;
    }
    if (at < end && *at == 'e') {
        whole = 0;
        ++at;
        if (at < end && (*at == '+' || *at == '-')) ++at;
        at = fk_scan_digits(at, end);
        if (at == NULL) return NULL;
    }
    return negative && whole && *first == '0' ? NULL : at; /* -0 is 0 */
}

static const char *fk_scan(const char *at, const char *end, int depth);

static const char *fk_scan_array(const char *at, const char *end, int depth) {
    if (++at < end && *at == ']') return at + 1;
    for (;;) {
        at = fk_scan(at, end, depth);
        if (at == NULL || at == end) return NULL;
        if (*at == ']') return at + 1;
        if (*at++ != ',') return NULL;
    }
}

/* Whether the key at `one` comes before the one at `other`; both end with a quotation mark, which sorts first. */
static int fk_key_before(fk_json one, fk_json other) {
    size_t lengths[2], least;
    int order;
    lengths[0] = (size_t)(one.end - one.at), lengths[1] = (size_t)(other.end - other.at);
    least = lengths[0] < lengths[1] ? lengths[0] : lengths[1];
    order = memcmp(one.at, other.at, least);
    return order != 0 ? order < 0 : lengths[0] < lengths[1];
}

static const char *fk_scan_object(const char *at, const char *end, int depth) {
    fk_json before = {NULL, NULL}, key;
    if (++at < end && *at == '}') return at + 1;
    for (;;) {
        if (at == end || *at != '"') return NULL;
        key.at = at + 1;
        at = fk_scan_string(at, end);
        if (at == NULL) return NULL;
        key.end = at - 1;
        /* No document has a key that needs an escape. */
        if (memchr(key.at, '\\', (size_t)(key.end - key.at)) != NULL) return NULL;
        if (before.at != NULL && !fk_key_before(before, key)) return NULL;
        before = key;
        if (at == end || *at++ != ':') return NULL;
        at = fk_scan(at, end, depth);
        if (at == NULL || at == end) return NULL;
        if (*at == '}') return at + 1;
        if (*at++ != ',') return NULL;
    }
}

static const char *fk_scan(const char *at, const char *end, int depth) {
    static const char *const words[] = {"true", "false", "null"};
    int index;
    if (at == end || depth == FK_MOST_DEPTH) return NULL;
    if (*at == '"') return fk_scan_string(at, end);
    if (*at == '[') return fk_scan_array(at, end, depth + 1);
    if (*at == '{') return fk_scan_object(at, end, depth + 1);
    if (*at == '-' || fk_is_digit(*at)) return fk_scan_number(at, end);
    for (index = 0; index < 3; ++index) {
        size_t length = strlen(words[index]);
        if ((size_t)(end - at) >= length && memcmp(at, words[index], length) == 0) return at + length;
    }
    return NULL;
}

/* Whether the text is one canonical object. */
static int fk_json_check(const char *text, size_t size, fk_json *root) {
    root->at = text;
    root->end = text + size;
    return size > 0 && *text == '{' && fk_scan(text, root->end, 0) == root->end;
}

static int fk_json_is(fk_json value, char opening) { return *value.at == opening; }

static int fk_json_says(fk_json value, const char *text) {
    size_t length = strlen(text);
    return (size_t)(value.end - value.at) == length && memcmp(value.at, text, length) == 0;
}

/* What is between the brackets of an array or an object. */
static fk_json fk_json_inside(fk_json value) {
    fk_json inside;
    inside.at = value.at + 1;
    inside.end = value.end - 1;
    return inside;
}

/* The next item; `key`, where it is not NULL, gets that of an object's member, without its quotation marks. */
static int fk_json_next(fk_json *rest, fk_json *key, fk_json *item) {
    if (rest->at == rest->end) return 0;
    if (key != NULL) {
        key->at = rest->at + 1;
        rest->at = fk_scan_string(rest->at, rest->end) + 1;
        key->end = rest->at - 2;
    }
    item->at = rest->at;
    item->end = rest->at = fk_scan(rest->at, rest->end, 0);
    if (rest->at != rest->end) ++rest->at;
    return 1;
}

static int fk_json_count(fk_json value) {
    fk_json rest = fk_json_inside(value), key, item;
    int count = 0, object = fk_json_is(value, '{');
    while (fk_json_next(&rest, object ? &key : NULL, &item)) ++count;
    return count;
}

static int fk_json_member(fk_json object, const char *name, fk_json *found) {
    fk_json rest = fk_json_inside(object), key;
    while (fk_json_next(&rest, &key, found))
        if (fk_json_says(key, name)) return 1;
    return 0;
}

/* A whole number of 64 bits. */
static int fk_json_integer(fk_json value, int64_t *result) {
    int negative = fk_json_is(value, '-');
    const char *at = value.at + negative;
    uint64_t number = 0, most = (uint64_t)INT64_MAX + (uint64_t)negative;
    if (at == value.end) return 0;
    for (; at < value.end; ++at) {
        unsigned digit = (unsigned)(*at - '0');
        if (!fk_is_digit(*at) || number > (most - digit) / 10) return 0;
        number = number * 10 + digit;
    }
    *result = negative ? -(int64_t)(number - (number != 0)) - (number != 0) : (int64_t)number;
    return 1;
}

/* Any number, rounded as everywhere: put to strtod without a decimal point, which would be the locale's. */
static int fk_json_number(fk_json value, double *result) {
    int negative = fk_json_is(value, '-'), digits = 0, point = 0, after = 0;
    const char *at = value.at + negative;
    uint64_t number = 0;
    int64_t exponent = 0;
    char text[64];
    if (at == value.end || !fk_is_digit(*at)) return 0;
    for (; at < value.end && *at != 'e'; ++at) {
        if (*at == '.') {
            point = 1;
            continue;
        }
        if (digits == 19) return 0; /* more than any double needs */
        number = number * 10 + (unsigned)(*at - '0');
        digits += number != 0;
        after += point;
    }
    if (at < value.end) {
        fk_json power;
        power.at = at + 1 + (at[1] == '+');
        power.end = value.end;
        if (!fk_json_integer(power, &exponent) || exponent < -9999 || exponent > 9999) return 0;
    }
    snprintf(text, sizeof text, "%s%llue%d", negative ? "-" : "", (unsigned long long)number, (int)exponent - after);
    *result = strtod(text, NULL);
    return 1;
}

static unsigned fk_json_code(const char *at) {
    return (unsigned)(fk_hex(at[0]) << 12 | fk_hex(at[1]) << 8 | fk_hex(at[2]) << 4 | fk_hex(at[3]));
}

static char *fk_utf8(char *out, unsigned code) {
    static const unsigned char first[] = {0, 0xC0, 0xE0, 0xF0};
    int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    *out++ = (char)(first[more] | code >> (6 * more));
    while (more-- > 0) *out++ = (char)(0x80 | (code >> (6 * more) & 0x3F));
    return out;
}

/* A string's text in UTF-8, with a 0 behind it; NULL where there is no memory. A surrogate alone stays one. */
static const char *fk_json_string(fk_arena *arena, fk_json value, size_t *length) {
    static const char letters[] = "nrtbf", meant[] = "\n\r\t\b\f";
    char *text = (char *)fk_take(arena, (size_t)(value.end - value.at), 1), *out = text;
    const char *at = value.at + 1, *end = value.end - 1;
    if (text == NULL) return NULL;
    while (at < end) {
        const char *found;
        unsigned code;
        if (*at != '\\') {
            *out++ = *at++;
            continue;
        }
        at += 2;
        if (at[-1] != 'u') {
            found = strchr(letters, at[-1]);
            *out++ = found == NULL ? at[-1] : meant[found - letters];
            continue;
        }
        code = fk_json_code(at);
        at += 4;
        if (code >> 10 == 0x36 && end - at >= 6 && at[0] == '\\' && at[1] == 'u' && fk_json_code(at + 2) >> 10 == 0x37) {
            code = 0x10000 + ((code & 0x3FF) << 10) + (fk_json_code(at + 2) & 0x3FF);
            at += 6;
        }
        out = fk_utf8(out, code);
    }
    *length = (size_t)(out - text);
    return text;
}
