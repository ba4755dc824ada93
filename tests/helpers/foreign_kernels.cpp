// Runs one CPU kernel on arguments from a file and writes the buffers back: so that kernels built for another processor
// can be called through an emulator. The file: for each argument of the kernel its size in bytes, and its content.
#ifdef DYNAMIC
#include "dynamic.cpp"
#else
#include "kernels.cpp"
#include "quantized.cpp"
#endif

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <vector>

struct Arguments {
    std::vector<std::vector<char>> contents;
    size_t next = 0;

    template <class T> T take() {
        std::vector<char>& content = contents[next++];
        if constexpr (std::is_pointer_v<T>) return content.empty() ? nullptr : (T)content.data();
        T value;
        if (content.size() != sizeof value) std::exit(2);
        std::memcpy(&value, content.data(), sizeof value);
        return value;
    }
};

template <class... Types> void run(void (*kernel)(Types...), Arguments& arguments) {
    std::apply(kernel, std::tuple<Types...>{arguments.take<Types>()...});  // braces: in this order
}

#define BOTH(name) \
    {#name "_bfloat16", [](Arguments& a) { run(name##_bfloat16, a); }}, \
    {#name "_float32", [](Arguments& a) { run(name##_float32, a); }}
const std::map<std::string, void (*)(Arguments&)> KERNELS = {
#ifdef DYNAMIC
    BOTH(linear_dynamic), BOTH(grouped_dynamic), BOTH(dynamic_rows),
    {"pack_dynamic", [](Arguments& a) { run(pack_dynamic, a); }}};
#else
    BOTH(linear), BOTH(attend), BOTH(add_rms_norm), BOTH(silu_and_mul), BOTH(norm_rope_store), BOTH(sample),
    BOTH(grouped_linear), BOTH(route), BOTH(combine), BOTH(causal_conv), BOTH(gated_delta),
    BOTH(gated_rms_norm), BOTH(sigmoid_and_mul),
    BOTH(pack_codes), BOTH(chunk_sizes), BOTH(weight_rows), BOTH(linear_codes), BOTH(grouped_codes),
    {"edit_logits_float32", [](Arguments& a) { run(edit_logits_float32, a); }},
    {"pack", [](Arguments& a) { run(pack, a); }}, {"packed_rows", [](Arguments& a) { run(packed_rows, a); }},
    {"gather_rows", [](Arguments& a) { run(gather_rows, a); }}};
#endif

int main(int, char** argv) {
    Arguments arguments;
    FILE* file = std::fopen(argv[2], "r+b");
    for (int64_t size; std::fread(&size, sizeof size, 1, file) == 1;) {
        arguments.contents.emplace_back(size);
        if (std::fread(arguments.contents.back().data(), 1, size, file) != (size_t)size) return 1;
    }
    KERNELS.at(argv[1])(arguments);
    std::rewind(file);
    for (const auto& content : arguments.contents) {
        const int64_t size = content.size();
        std::fwrite(&size, sizeof size, 1, file);
        std::fwrite(content.data(), 1, content.size(), file);
    }
    return std::fclose(file);
}
