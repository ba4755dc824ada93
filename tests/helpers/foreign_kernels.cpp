// Runs one CPU kernel on arguments from a file and writes the buffers back: so that kernels built for another processor
// can be called through an emulator. The file: for each argument of the kernel its size in bytes, and its content.
#ifdef DYNAMIC
#include "dynamic.cpp"
#else
#include "kernels.cpp"
#include "quantized.cpp"
#endif

#include <cstdio>
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
        else { T value; std::memcpy(&value, content.data(), sizeof value); return value; }
    }
};

template <class... Types> void run(void (*kernel)(Types...), Arguments& arguments) {
    std::apply(kernel, std::tuple<Types...>{arguments.take<Types>()...});  // braces: in this order
}

#define KERNEL(name) \
    {#name "_bfloat16", [](Arguments& a) { run(name##_bfloat16, a); }}, \
    {#name "_float32", [](Arguments& a) { run(name##_float32, a); }}
const std::map<std::string, void (*)(Arguments&)> KERNELS = {
#ifdef DYNAMIC
    KERNEL(linear_dynamic), KERNEL(dynamic_rows), {"pack_dynamic", [](Arguments& a) { run(pack_dynamic, a); }}};
#else
    KERNEL(linear), KERNEL(attend), KERNEL(add_rms_norm), KERNEL(silu_and_mul), KERNEL(norm_rope_store), KERNEL(sample),
    KERNEL(grouped_linear), KERNEL(route), KERNEL(combine), KERNEL(causal_conv), KERNEL(gated_delta),
    KERNEL(gated_rms_norm), KERNEL(sigmoid_and_mul),
    KERNEL(pack_codes), KERNEL(weight_rows), KERNEL(linear_codes), KERNEL(grouped_codes),
    {"edit_logits", [](Arguments& a) { run(edit_logits, a); }},
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
