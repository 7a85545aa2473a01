"""hash of the SASS of some configs' kernels"""
import sys,os,hashlib,subprocess,tempfile,re
os.environ.setdefault("CUTE_DSL_ARCH","sm_90a")
from tsmla_kernels.catalog import MLA_DECODE, mla_decode_config
from tsmla_kernels.compile import compile_kernel
from tsmla_kernels.resources import cubin_of, resource_report
CFG={"s4":dict(num_heads="16",max_q_len="4"),"h64":dict(num_heads="64"),"h128p16":dict(num_heads="128",page_size="16",ragged="true",max_q_len="3"),"l256b":dict(num_heads="128",latent_dim="256",rope_dim="0"),"sg0f":dict(num_heads="16",max_q_len="1",dtype="float8_e4m3fn",batch_invariant="false"),"sg0t":dict(num_heads="16",max_q_len="1",dtype="float8_e4m3fn",batch_invariant="true"),"sg1f":dict(num_heads="16",max_q_len="4",dtype="float8_e4m3fn",batch_invariant="false"),"sg1t":dict(num_heads="16",max_q_len="4",dtype="float8_e4m3fn",batch_invariant="true"),"sg2f":dict(num_heads="128",max_q_len="1",dtype="float8_e4m3fn",batch_invariant="false"),"sg2t":dict(num_heads="128",max_q_len="1",dtype="float8_e4m3fn",batch_invariant="true"),"sg3f":dict(num_heads="9",max_q_len="2",dtype="float8_e4m3fn",batch_invariant="false"),"sg3t":dict(num_heads="9",max_q_len="2",dtype="float8_e4m3fn",batch_invariant="true"),"q8s2h32":dict(num_heads="32",max_q_len="2",dtype="float8_e4m3fn"),"kv8h16":dict(num_heads="16",kv_dtype="float8_e4m3fn"),"kv8s4":dict(num_heads="16",max_q_len="4",kv_dtype="float8_e4m3fn"),"h16":dict(num_heads="16"),"h128":dict(num_heads="128",max_q_len="2"),"inv":dict(num_heads="16",max_q_len="4",ragged="true",batch_invariant="true"),"l256":dict(num_heads="9",latent_dim="256",rope_dim="0",page_size="16",dtype="float16"),
"kv8":dict(num_heads="128",max_q_len="2",kv_dtype="float8_e4m3fn"),"q8":dict(num_heads="16",dtype="float8_e4m3fn"),"q8c":dict(num_heads="128",max_q_len="2",dtype="float8_e4m3fn"),"q8inv":dict(num_heads="16",max_q_len="4",page_size="16",ragged="true",batch_invariant="true",dtype="float8_e4m3fn"),
"inv2":dict(num_heads="128",max_q_len="2",batch_invariant="true"),"q8h32":dict(num_heads="32",dtype="float8_e4m3fn"),"q8h64":dict(num_heads="64",dtype="float8_e4m3fn"),"q8l256":dict(num_heads="9",latent_dim="256",rope_dim="0",page_size="128",dtype="float8_e4m3fn")}
NV=subprocess.run("find /opt/venv -name nvdisasm -type f | head -1",shell=True,capture_output=True,text=True).stdout.strip()
for name in sys.argv[1:] or ["h16","h128","inv","l256","kv8"]:
    try: c=compile_kernel(MLA_DECODE, mla_decode_config(CFG[name]), "sm_90a")
    except Exception as e: print(name,"FAILED",str(e)[-3000:]); continue
    r=resource_report(c)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin_of(c.module)); f.flush()
        s=subprocess.run([NV,"-c",f.name],capture_output=True,text=True).stdout
    os.makedirs("/work/notes/sass",exist_ok=True); open(f"/work/notes/sass/{name}.sass","w").write(s)
    ins=[re.sub(r"/\*[0-9a-f]+\*/","",l).strip() for l in s.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/",l)]
    h=hashlib.sha1("\n".join(ins).encode()).hexdigest()[:10]
    print(name,h,len(ins),[(k.name[:40],k.registers,k.stack_bytes) for k in r.kernels],"SERIALISED" if r.serialised else "", re.findall(r"[1-9]\d* bytes spill \w+",c.log), f"{c.seconds:.0f}s", r.serialised[:2],flush=True)
